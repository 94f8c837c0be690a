//! Machines come and go for a day.
