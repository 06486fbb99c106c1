//! Times written as decimal microseconds, read to integer nanoseconds without floating point.

/// Nanoseconds of a decimal number of microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Nanoseconds {
    pub ns: i64,
    /// The text was finer than a nanosecond and was rounded to the nearest, halves away from zero.
    pub rounded: bool,
}

/// Digits that a time may have: more than any clock gives, and they fit an `i128`.
const DIGITS_MAX: usize = 30;
/// Decimal places from microseconds to nanoseconds.
const PLACES: i32 = 3;

/// Reads `4458676522690.655`, `1.5e6` or `"12"`, in microseconds. `None`: no number, or one that
/// does not fit.
pub(super) fn nanoseconds(text: &str) -> Option<Nanoseconds> {
    let text = unquoted(text);
    let (text, negative) = match text.strip_prefix('-') {
        Some(rest) => (rest, true),
        None => (text, false),
    };
    let (mantissa, exponent) = match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
        None => (text, 0),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if whole.is_empty() || whole.len() + fraction.len() > DIGITS_MAX {
        return None;
    }
    let mut digits: i128 = 0;
    for digit in whole.bytes().chain(fraction.bytes()) {
        if !digit.is_ascii_digit() {
            return None;
        }
        digits = digits * 10 + i128::from(digit - b'0');
    }
    let shift = exponent
        .checked_sub(fraction.len() as i32)?
        .checked_add(PLACES)?;
    let (size, rounded) = if digits == 0 {
        (0, false)
    } else if shift >= 0 {
        let factor = 10_i128.checked_pow(shift.unsigned_abs())?;
        (digits.checked_mul(factor)?, false)
    } else {
        match 10_i128.checked_pow(shift.unsigned_abs()) {
            Some(unit) => ((digits + unit / 2) / unit, digits % unit != 0),
            // So small that nothing is left of it.
            None => (0, true),
        }
    };
    let ns = i64::try_from(if negative { -size } else { size }).ok()?;
    Some(Nanoseconds { ns, rounded })
}

/// The text of a JSON number, or of a JSON string without its quotes.
pub(super) fn unquoted(text: &str) -> &str {
    text.strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'))
        .unwrap_or(text)
        .trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn microseconds_become_exact_nanoseconds() {
        let exact = |text: &str| nanoseconds(text).map(|read| (read.ns, read.rounded));
        for (text, ns) in [
            ("1683564901548726", 1_683_564_901_548_726_000),
            ("4458676522690.655", 4_458_676_522_690_655),
            ("0.001", 1),
            ("12.5", 12_500),
            ("1.5e6", 1_500_000_000),
            ("15E-1", 1_500),
            ("\"7.25\"", 7_250),
            ("-3", -3_000),
            ("0", 0),
            ("0e999", 0),
        ] {
            assert_eq!(exact(text), Some((ns, false)), "{text}");
        }
        assert_eq!(exact("0.0014"), Some((1, true)));
        assert_eq!(exact("0.0015"), Some((2, true)));
        assert_eq!(exact("-0.0015"), Some((-2, true)));
        assert_eq!(exact("1e-300"), Some((0, true)));
    }

    #[test]
    fn what_is_no_time_is_none() {
        for text in [
            "",
            "-",
            ".5",
            "1.2.3",
            "0x10",
            "NaN",
            "1e",
            "1e99999999999",
            "9e18",
            "null",
            "1234567890123456789012345678901",
        ] {
            assert_eq!(nanoseconds(text), None, "{text}");
        }
    }
}
