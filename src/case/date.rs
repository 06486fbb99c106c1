//! A calendar date, for the run of a silicon value and the end of a tolerance.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// A valid date of the Gregorian calendar. Ordered by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Date {
    year: u16,
    month: u8,
    day: u8,
}

impl Date {
    /// `None` where the calendar has no such day.
    pub fn new(year: u16, month: u8, day: u8) -> Option<Self> {
        let leap =
            year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let days = match month {
            1 | 3 | 5 | 7 | 8 | 10 | 12 => 31,
            4 | 6 | 9 | 11 => 30,
            2 if leap => 29,
            2 => 28,
            _ => return None,
        };
        (1..=days)
            .contains(&day)
            .then_some(Self { year, month, day })
    }
}

impl FromStr for Date {
    type Err = &'static str;

    /// Takes exactly `YYYY-MM-DD`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const SHAPE: &str = "expected YYYY-MM-DD";
        let digits = |range: std::ops::Range<usize>| {
            text.get(range)
                .filter(|part| part.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|part| part.parse::<u16>().ok())
                .ok_or(SHAPE)
        };
        if text.len() != 10 || text.get(4..5) != Some("-") || text.get(7..8) != Some("-") {
            return Err(SHAPE);
        }
        let (year, month, day) = (digits(0..4)?, digits(5..7)?, digits(8..10)?);
        u8::try_from(month)
            .ok()
            .zip(u8::try_from(day).ok())
            .and_then(|(month, day)| Self::new(year, month, day))
            .ok_or("the calendar has no such day")
    }
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

impl Serialize for Date {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
