//! Content codings in headers (RFC 9110, 8.4 and 12.5.3).
//!
//! Only gzip is supported: every client has it, in both directions. Others (zstd, br) would save some percent more of
//! mostly digits, which does not justify a second decoder as attack surface or a choice to explain.

/// Content coding of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// No coding.
    Identity,
    /// RFC 1952.
    Gzip,
}

/// Parses `content-encoding`; `None` if it is not supported, such as several codings on top of each other.
pub fn of_content(value: Option<&[u8]>) -> Option<Coding> {
    let value = value.unwrap_or_default().trim_ascii();
    let is = |name: &[u8]| value.eq_ignore_ascii_case(name);
    if value.is_empty() || is(b"identity") {
        Some(Coding::Identity)
    } else if is(b"gzip") || is(b"x-gzip") {
        Some(Coding::Gzip)
    } else {
        None
    }
}

/// Returns whether an `accept-encoding` accepts gzip: by name or by `*`, and not with the weight 0.
pub fn accepts_gzip(value: Option<&[u8]>) -> bool {
    let mut by_star = false;
    for part in value.unwrap_or_default().split(|byte| *byte == b',') {
        let mut parameters = part.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
        let name = parameters.next().unwrap_or_default();
        let is_rejected = parameters.any(is_weight_zero);
        if name.eq_ignore_ascii_case(b"gzip") || name.eq_ignore_ascii_case(b"x-gzip") {
            return !is_rejected;
        }
        by_star |= name == b"*" && !is_rejected;
    }
    by_star
}

/// Returns whether the parameter is `q=0`, `q=0.` or `q=0.000`.
fn is_weight_zero(parameter: &[u8]) -> bool {
    match parameter {
        [b'q' | b'Q', b'=', b'0'] => true,
        [b'q' | b'Q', b'=', b'0', b'.', digits @ ..] => digits.iter().all(|digit| *digit == b'0'),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_plain_or_gzip_or_unsupported() {
        let check = |value: Option<&str>, expected| {
            assert_eq!(of_content(value.map(str::as_bytes)), expected, "{value:?}")
        };
        check(None, Some(Coding::Identity));
        check(Some(""), Some(Coding::Identity));
        check(Some("Identity"), Some(Coding::Identity));
        check(Some("gzip"), Some(Coding::Gzip));
        check(Some(" X-GZIP "), Some(Coding::Gzip));
        check(Some("gzip, gzip"), None);
        check(Some("br"), None);
        check(Some("zstd"), None);
        check(Some("gzi"), None);
    }

    #[test]
    fn gzip_is_accepted_if_the_header_says_so() {
        let check =
            |value: &str, expected| assert_eq!(accepts_gzip(Some(value.as_bytes())), expected, "{value}");
        check("gzip", true);
        check("br, GZIP;q=0.5, *;q=0", true);
        check("*", true);
        check("gzip;q=0", false);
        check("gzip; q=0.000, *", false);
        check("*;q=0.0", false);
        check("identity, br", false);
        check("", false);
        check(",,;", false);
        assert!(!accepts_gzip(None));
    }
}
