//! The date that some templates of conversations write.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// A day of the Gregorian calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Date {
    /// Days since 1970-01-01.
    days: i64,
}

impl Date {
    /// Returns today's date in UTC.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the date of a conversation is one of the world")]
    pub fn today() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { days: (since.as_secs() / 86400).cast_signed() }
    }

    /// Returns the day so many days after 1970-01-01.
    #[must_use]
    pub const fn of_days(days: i64) -> Self {
        Self { days }
    }

    /// Returns year, month and day, counted from 1.
    ///
    /// Source: Hinnant, "chrono-compatible low-level date algorithms", `civil_from_days`.
    const fn civil(self) -> (i64, i64, i64) {
        let shifted = self.days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        (year_of_era + era * 400 + (month <= 2) as i64, month, day)
    }

    /// Writes the date as Python's `strftime` does.
    pub(super) fn format(self, format: &str) -> Result<String, String> {
        let (year, month, day) = self.civil();
        let month_name = MONTHS[(month - 1) as usize];
        let weekday = DAYS[(self.days + 3).rem_euclid(7) as usize];
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let _ = match chars.next() {
                Some('Y') => write!(out, "{year}"),
                Some('y') => write!(out, "{:02}", year.rem_euclid(100)),
                Some('m') => write!(out, "{month:02}"),
                Some('d') => write!(out, "{day:02}"),
                Some('B') => write!(out, "{month_name}"),
                Some('b') => write!(out, "{}", &month_name[..3]),
                Some('A') => write!(out, "{weekday}"),
                Some('a') => write!(out, "{}", &weekday[..3]),
                Some('%') => write!(out, "%"),
                other => {
                    let other = other.map(String::from).unwrap_or_default();
                    return Err(format!(
                        "it writes the date with %{other}, expected %Y %y %m %d %B %b %A %a"
                    ));
                }
            };
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_their_dates() {
        // `date -u -d @$((86400 * N)) '+%Y-%m-%d %A %d %b %y'`
        for (days, expected) in [
            (0, "1970-01-01 Thursday 01 Jan 70"),
            (11_016, "2000-02-29 Tuesday 29 Feb 00"),
            (20_786, "2026-11-29 Sunday 29 Nov 26"),
            (-1, "1969-12-31 Wednesday 31 Dec 69"),
        ] {
            assert_eq!(Date::of_days(days).format("%Y-%m-%d %A %d %b %y").unwrap(), expected);
        }
        assert!(Date::today().days > 20_000);
        assert!(Date::of_days(0).format("%H").unwrap_err().contains("%H"));
    }
}
