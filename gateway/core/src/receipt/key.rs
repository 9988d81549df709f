//! Attempt keys, by which the two receipts of an attempt are joined.
//!
//! The identifier of a request is the client's and may be used twice, and the parts of a split request number their
//! attempts independently. So a gateway gives each attempt a number of its own and sends it together with a random
//! number drawn at start-up.

use std::fmt;
use std::str::FromStr;

/// Key of one attempt, unique over all gateways and their restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttemptKey {
    /// Random number drawn when the gateway process starts.
    pub gateway: u64,
    /// Number of the attempt in that process, from 1.
    pub number: u64,
}

/// Error for a malformed identifier of an attempt in a receipt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an attempt key is 16 hexadecimal digits, '-' and a decimal number")]
pub struct InvalidAttemptKey;

impl fmt::Display for AttemptKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AttemptKey { gateway, number } = self;
        write!(f, "{gateway:016x}-{number}")
    }
}

impl FromStr for AttemptKey {
    type Err = InvalidAttemptKey;

    fn from_str(text: &str) -> Result<AttemptKey, InvalidAttemptKey> {
        let (gateway, number) = text.split_once('-').ok_or(InvalidAttemptKey)?;
        let hexadecimal = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let decimal = number.bytes().all(|byte| byte.is_ascii_digit());
        if gateway.len() != 16 || !gateway.bytes().all(hexadecimal) || !decimal {
            return Err(InvalidAttemptKey);
        }
        let gateway = u64::from_str_radix(gateway, 16).map_err(|_| InvalidAttemptKey)?;
        Ok(AttemptKey { gateway, number: number.parse().map_err(|_| InvalidAttemptKey)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_parsed_back_and_other_texts_are_rejected() {
        for key in [AttemptKey { gateway: 0, number: 1 }, AttemptKey { gateway: u64::MAX, number: u64::MAX }]
        {
            assert_eq!(key.to_string().parse(), Ok(key));
        }
        for text in [
            "",
            "-",
            "00000000000000ff",
            "ff-1",
            "00000000000000FF-1",
            "00000000000000ff--1",
            "00000000000000ff-+1",
        ] {
            assert_eq!(text.parse::<AttemptKey>(), Err(InvalidAttemptKey), "{text}");
        }
        assert_eq!("00000000000000ff-18446744073709551616".parse::<AttemptKey>(), Err(InvalidAttemptKey));
    }
}
