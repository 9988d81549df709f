//! Idempotency keys of clients, which a gateway checks before it receives a file, and a region before it stores the key.

use crate::respond::Rejection;
use replica_api::error::ErrorCode;
use replica_api::headers;

/// Longest idempotency key, bytes.
const KEY_BYTES_MAX: usize = 255;

/// Rejects a key that is empty, too long, or not printable ASCII.
pub(crate) fn check(key: &str) -> Result<(), Rejection> {
    let is_valid =
        (1..=KEY_BYTES_MAX).contains(&key.len()) && key.bytes().all(|byte| (0x20..0x7f).contains(&byte));
    if is_valid {
        return Ok(());
    }
    let message = format!(
        "{} is not valid: it has {} bytes; write 1 to {KEY_BYTES_MAX} printable ASCII characters.",
        headers::IDEMPOTENCY_KEY,
        key.len()
    );
    Err(Rejection::new(ErrorCode::InvalidHeader, message).of(headers::IDEMPOTENCY_KEY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_1_to_255_printable_characters() {
        for key in ["a", "order 17", &"x".repeat(KEY_BYTES_MAX)] {
            assert_eq!(check(key), Ok(()), "{key}");
        }
        for key in ["", "ü", "a\u{7f}", &"x".repeat(KEY_BYTES_MAX + 1)] {
            assert_eq!(
                check(key).map_err(|rejection| rejection.code),
                Err(ErrorCode::InvalidHeader),
                "{key}"
            );
        }
    }
}
