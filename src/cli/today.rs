//! The day, for the dates of ledger files and the end of tolerances. Predictions have no clock.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::case::Date;
use crate::timing::InputError;

const SECONDS_PER_DAY: u64 = 24 * 60 * 60;

/// `given`, or the day in UTC.
pub fn today(given: Option<Date>) -> Result<Date, InputError> {
    if let Some(given) = given {
        return Ok(given);
    }
    let since = SystemTime::now().duration_since(UNIX_EPOCH).ok();
    since
        .and_then(|since| day(since.as_secs() / SECONDS_PER_DAY))
        .ok_or_else(|| InputError::new("clock", "the clock shows no valid day", "set the clock"))
}

/// The day that many days after 1970-01-01.
fn day(mut days: u64) -> Option<Date> {
    let first = |year: u16, month: u8| Date::new(year, month, 1).is_some();
    let length = |year: u16, month: u8| {
        (28..=31)
            .rev()
            .find(|day| Date::new(year, month, *day).is_some())
    };
    let (mut year, mut month) = (1970, 1);
    while first(year, month) {
        let length = length(year, month)?;
        if days < u64::from(length) {
            return Date::new(year, month, u8::try_from(days).ok()? + 1);
        }
        days -= u64::from(length);
        (year, month) = if month == 12 {
            (year + 1, 1)
        } else {
            (year, month + 1)
        };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_counted_over_leap_years() {
        for (days, shown) in [
            (0, "1970-01-01"),
            (789, "1972-02-29"),
            (20_788, "2026-12-01"),
        ] {
            assert_eq!(day(days).map(|day| day.to_string()), Some(shown.to_owned()));
        }
    }
}
