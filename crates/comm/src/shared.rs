//! Memory that two processes of one host share: a sealed file without a name, with a ring in each direction,
//! and how it is handed over. It knows no frame, no link and no collective.
//!
//! Both processes belong to one user, which is checked. A peer that lies about positions, slots or lengths is
//! an error. One that writes into a slot that it has handed over changes values, and nothing else.

mod bell;
mod handover;
mod map;
mod ring;

pub(crate) use bell::Doorbell;
pub(crate) use handover::{Offer, give_bell, hand, take_bell};
pub(crate) use map::{Direction, Segment};
pub(crate) use ring::{Consumer, Producer, Slot};
