//! Validation of the head of an HTTP/1 request before any parser acts on it.
//!
//! Attacks on a proxy use what it and its neighbours parse differently: two lengths, a length and a transfer coding, a
//! lone CR that one takes for the end of a line and another for part of a value. Parsers are tolerant (ours drops a
//! length beside a transfer coding, repairs a broken request line, accepts a lone LF, and reads a megabyte); so
//! everything that RFC 9112 allows a server to reject is rejected here, before the parser sees it, and an accepted head
//! has only one interpretation.
//!
//! [`HeadScanner`] is fed the buffer as it grows and processes each byte once, whatever the size of the reads. It knows
//! only the headers that state where a message ends and its host.

use memchr::{memchr, memchr_iter};

/// Maximum bytes of a request head, with its blank line: as nginx (four of 8 KiB) and Envoy (60 KiB), and more than any
/// key, token and trace context together. The limit of response heads, which regions and not clients write, is
/// independent (`http1::HEAD_BYTES_MAX`).
pub const HEAD_BYTES_MAX: usize = 64 << 10;
/// Maximum bytes of a request target. Our paths have less than a hundred; RFC 9112 (3) recommends 8,000.
pub const TARGET_BYTES_MAX: usize = 8 << 10;
/// Maximum fields of a head. Browsers send 20; a chain of proxies adds as many.
pub const FIELDS_MAX: usize = 100;
/// Maximum blank lines before a request that are skipped (RFC 9112, 2.2, for clients that end a body with one too
/// many).
const BLANK_LINES_MAX: u8 = 1;

/// Reason why a head is rejected; the connection cannot be used any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadProblem {
    /// More than [`HEAD_BYTES_MAX`].
    TooLong,
    /// The target is longer than [`TARGET_BYTES_MAX`].
    TargetTooLong,
    /// More than [`FIELDS_MAX`] fields.
    TooManyFields,
    /// A transfer coding that is not `chunked` alone.
    UnknownCoding,
    /// Not HTTP/1.1 by RFC 9112; the text continues "The request cannot be read: ".
    Malformed(&'static str),
}

/// Scanner of a request head.
#[derive(Clone, Debug, Default)]
pub struct HeadScanner {
    /// Start of the current incomplete line.
    line: usize,
    /// End of the bytes that were searched for line ends.
    searched: usize,
    blank_lines: u8,
    version: Option<Version>,
    fields: usize,
    host: bool,
    length: bool,
    coding: bool,
    absolute: bool,
}

/// Complete head of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScannedHead {
    /// Length in bytes, with the blank line.
    pub length: usize,
    /// Whether the body is chunked.
    pub is_chunked: bool,
    /// Whether its target is an absolute URL, which [`origin_form`] rewrites.
    pub is_absolute: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    Http10,
    Http11,
}

type HeadResult<T> = Result<T, HeadProblem>;

impl HeadScanner {
    /// Continues the scan: `bytes` are all bytes since the last request, starting with those of the previous call.
    /// Returns the head once it is complete.
    ///
    /// # Errors
    ///
    /// As soon as the head is known to be invalid, which may be before its end.
    pub fn advance(&mut self, bytes: &[u8]) -> HeadResult<Option<ScannedHead>> {
        for at in memchr_iter(b'\n', &bytes[self.searched..]) {
            let end = self.searched + at;
            let line = &bytes[self.line..end];
            self.line = end + 1;
            if self.line > HEAD_BYTES_MAX {
                return Err(HeadProblem::TooLong);
            }
            let line =
                line.strip_suffix(b"\r").ok_or(HeadProblem::Malformed("a line ends in LF without CR"))?;
            if memchr(b'\r', line).is_some() {
                return Err(HeadProblem::Malformed("a CR is not followed by LF"));
            }
            match (self.version, line.is_empty()) {
                (None, true) if self.blank_lines < BLANK_LINES_MAX => self.blank_lines += 1,
                (None, _) => {
                    let (version, absolute) = request_line(line)?;
                    (self.version, self.absolute) = (Some(version), absolute);
                }
                (Some(_), false) => self.field(line)?,
                (Some(version), true) => return self.end(version).map(Some),
            }
        }
        self.searched = bytes.len();
        if bytes.len() > HEAD_BYTES_MAX {
            return Err(HeadProblem::TooLong);
        }
        // A client that does not send HTTP (a TLS handshake, say) may never send a line end.
        let begun = bytes.get(self.line).copied();
        if self.version.is_none() && begun.is_some_and(|byte| byte != b'\r' && !is_token(byte)) {
            return Err(HeadProblem::Malformed("it does not start with a method"));
        }
        Ok(None)
    }

    fn field(&mut self, line: &[u8]) -> HeadResult<()> {
        self.fields += 1;
        if self.fields > FIELDS_MAX {
            return Err(HeadProblem::TooManyFields);
        }
        if line.starts_with(b" ") || line.starts_with(b"\t") {
            return Err(HeadProblem::Malformed("a field continues on a second line (obs-fold)"));
        }
        let colon = memchr(b':', line).ok_or(HeadProblem::Malformed("a line of the head has no colon"))?;
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if name.is_empty() || !name.iter().copied().all(is_token) {
            return Err(HeadProblem::Malformed(
                "the name of a field is not a token, or is followed by a space",
            ));
        }
        // All of them, without a branch for each.
        let control = |byte: u8| (byte < b' ' && byte != b'\t') || byte == 0x7f;
        if value.iter().fold(false, |found, byte| found | control(*byte)) {
            return Err(HeadProblem::Malformed("a field has a control character"));
        }
        if name.eq_ignore_ascii_case(b"host") {
            set_once(&mut self.host, "it has two hosts")?;
            return host(value);
        }
        if name.eq_ignore_ascii_case(b"content-length") {
            set_once(&mut self.length, "it has two content-lengths")?;
            return length(value);
        }
        if name.eq_ignore_ascii_case(b"transfer-encoding") {
            set_once(&mut self.coding, "it has two transfer-encodings")?;
            return if value.eq_ignore_ascii_case(b"chunked") {
                Ok(())
            } else {
                Err(HeadProblem::UnknownCoding)
            };
        }
        Ok(())
    }

    fn end(&self, version: Version) -> HeadResult<ScannedHead> {
        if self.coding && self.length {
            return Err(HeadProblem::Malformed("it has both a content-length and a transfer-encoding"));
        }
        match version {
            Version::Http10 if self.coding => {
                Err(HeadProblem::Malformed("HTTP/1.0 has no transfer-encoding"))
            }
            Version::Http11 if !self.host => Err(HeadProblem::Malformed("it has no host")),
            Version::Http10 | Version::Http11 => {
                Ok(ScannedHead { length: self.line, is_chunked: self.coding, is_absolute: self.absolute })
            }
        }
    }
}

/// Parses `method SP target SP version` strictly; returns the version and whether the target is an absolute URL.
fn request_line(line: &[u8]) -> HeadResult<(Version, bool)> {
    if !line.first().copied().is_some_and(is_token) {
        return Err(HeadProblem::Malformed("it does not start with a method"));
    }
    let mut parts = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(HeadProblem::Malformed("the first line is not 'METHOD TARGET VERSION'"));
    };
    if method.is_empty() || !method.iter().copied().all(is_token) {
        return Err(HeadProblem::Malformed("the method is not a token"));
    }
    if target.len() > TARGET_BYTES_MAX {
        return Err(HeadProblem::TargetTooLong);
    }
    if target.is_empty() || !target.iter().all(|byte| matches!(byte, b'!'..=b'~') && *byte != b'#') {
        return Err(HeadProblem::Malformed("the target has a byte that is not allowed in targets"));
    }
    // RFC 9112 (3.2): a path, an absolute URL (for proxies), `*` of OPTIONS, `host:port` of CONNECT.
    let after_scheme = after_scheme(target);
    if let Some(rest) = after_scheme {
        authority(rest)?;
    }
    if !(target[0] == b'/' || after_scheme.is_some() || target == b"*" || method == b"CONNECT") {
        return Err(HeadProblem::Malformed("the target is neither a path nor a URL"));
    }
    match version {
        b"HTTP/1.1" => Ok((Version::Http11, after_scheme.is_some())),
        b"HTTP/1.0" => Ok((Version::Http10, after_scheme.is_some())),
        _ => Err(HeadProblem::Malformed("the version is neither HTTP/1.1 nor HTTP/1.0")),
    }
}

/// Returns the part of an absolute URL after its scheme.
fn after_scheme(target: &[u8]) -> Option<&[u8]> {
    [&b"http://"[..], b"https://"].iter().find_map(|scheme| {
        let (start, rest) = target.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some(rest)
    })
}

/// Splits a URL without its scheme into its authority and the rest.
fn authority(rest: &[u8]) -> HeadResult<(&[u8], &[u8])> {
    let end = rest.iter().position(|byte| matches!(byte, b'/' | b'?')).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    if authority.is_empty() {
        return Err(HeadProblem::Malformed("the URL of the target has no host"));
    }
    host(authority)?;
    if !is_host_and_port(authority) {
        return Err(HeadProblem::Malformed("the URL of the target has an invalid host or port"));
    }
    Ok((authority, path))
}

/// Returns whether brackets enclose a whole address, and the host is followed by a port or nothing (RFC 3986, 3.2.2 and
/// 3.2.3).
fn is_host_and_port(authority: &[u8]) -> bool {
    let (name, rest) = match authority.strip_prefix(b"[") {
        Some(address) => match address.iter().position(|byte| *byte == b']') {
            Some(end) => (&address[..end], &address[end + 1..]),
            None => return false,
        },
        None => {
            authority.split_at(authority.iter().position(|byte| *byte == b':').unwrap_or(authority.len()))
        }
    };
    let port = match rest {
        [] => return !name.is_empty() && !name.contains(&b'['),
        [b':', port @ ..] => port,
        _ => return false,
    };
    let number = std::str::from_utf8(port).ok().and_then(|text| text.parse::<u16>().ok());
    let is_port = port.is_empty() || port.iter().all(u8::is_ascii_digit) && number.is_some();
    !name.is_empty() && !name.contains(&b'[') && is_port
}

/// Returns the head with only the path as its target and the authority of the target as its host, whatever host it had
/// (RFC 9112, 3.2.2): `head` is complete, was scanned and [is absolute](ScannedHead::is_absolute).
pub fn origin_form(head: &[u8]) -> Vec<u8> {
    let start = head.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(0);
    let mut lines = head[start..].split_inclusive(|byte| *byte == b'\n');
    let line = lines.next().unwrap_or_default();
    let mut parts = line.split(|byte| *byte == b' ');
    let (method, target) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let version = parts.next().unwrap_or_default();
    let Some(Ok((authority, path))) = after_scheme(target).map(authority) else {
        return head.to_vec();
    };
    // Without a path it is the root; for OPTIONS it is the server (RFC 9112, 3.2.4).
    let root: &[u8] = match path {
        [] if method == b"OPTIONS" => b"*",
        [b'/', ..] => b"",
        _ => b"/",
    };
    let mut rewritten = [method, b" ", root, path, b" ", version, b"host: ", authority, b"\r\n"].concat();
    let is_host = |line: &&[u8]| line.get(..5).is_some_and(|name| name.eq_ignore_ascii_case(b"host:"));
    lines.filter(|line| !is_host(line)).for_each(|line| rewritten.extend_from_slice(line));
    rewritten
}

fn set_once(is_present: &mut bool, problem: &'static str) -> HeadResult<()> {
    if std::mem::replace(is_present, true) { Err(HeadProblem::Malformed(problem)) } else { Ok(()) }
}

/// Checks a name or address with an optional port; empty is allowed where a target has no authority (RFC 9112, 3.2).
fn host(value: &[u8]) -> HeadResult<()> {
    let fits = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~%:[]!$&'()*+;=".contains(byte);
    if value.iter().all(fits) {
        Ok(())
    } else {
        Err(HeadProblem::Malformed("the host has a byte that is not allowed in hosts"))
    }
}

/// Checks that the value is a decimal number of at most 63 bits, so that no reader overflows.
fn length(value: &[u8]) -> HeadResult<()> {
    let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    let number = std::str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok());
    match number {
        Some(_) if digits => Ok(()),
        _ => Err(HeadProblem::Malformed("the content-length is not a number")),
    }
}

/// Returns whether the byte can be in a token (RFC 9110, 5.6.2).
pub(crate) fn is_token(byte: u8) -> bool {
    /// Lookup table; a head has some hundred such bytes.
    const TOKENS: [bool; 256] = {
        let (mut tokens, mut byte) = ([false; 256], 0);
        while byte < 256 {
            tokens[byte] = (byte as u8).is_ascii_alphanumeric();
            byte += 1;
        }
        let (marks, mut index) = (b"!#$%&'*+-.^_`|~", 0);
        while index < marks.len() {
            tokens[marks[index] as usize] = true;
            index += 1;
        }
        tokens
    };
    TOKENS[usize::from(byte)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Checks the result for `head`, fed at once and byte for byte.
    #[track_caller]
    fn check(head: &[u8], expected: HeadResult<Option<ScannedHead>>) {
        assert_eq!(HeadScanner::default().advance(head), expected, "{}", head.escape_ascii());
        let mut scan = HeadScanner::default();
        let mut last = Ok(None);
        for end in 1..=head.len() {
            last = scan.advance(&head[..end]);
            if last != Ok(None) {
                break;
            }
        }
        assert_eq!(last, expected, "byte for byte: {}", head.escape_ascii());
    }

    fn length(head: &[u8]) -> HeadResult<Option<usize>> {
        HeadScanner::default().advance(head).map(|head| head.map(|head| head.length))
    }

    #[test]
    fn an_absolute_url_is_rewritten_and_its_authority_is_the_host() {
        let check = |head: &str, expected: &str| {
            let scanned = HeadScanner::default().advance(head.as_bytes()).unwrap().unwrap();
            assert!(scanned.is_absolute, "{head:?}");
            assert_eq!(String::from_utf8(origin_form(head.as_bytes())).unwrap(), expected, "{head:?}");
            let again = HeadScanner::default().advance(expected.as_bytes()).unwrap().unwrap();
            assert!(!again.is_absolute && again.length == expected.len(), "{expected:?}");
        };
        check(
            "GET http://y:80/v1/models?a=b HTTP/1.1\r\nx: y\r\nHost: x\r\n\r\n",
            "GET /v1/models?a=b HTTP/1.1\r\nhost: y:80\r\nx: y\r\n\r\n",
        );
        check("\r\nGET HTTPS://y HTTP/1.0\r\n\r\n", "GET / HTTP/1.0\r\nhost: y\r\n\r\n");
        check("GET http://y?a HTTP/1.1\r\nhost:\r\n\r\n", "GET /?a HTTP/1.1\r\nhost: y\r\n\r\n");
        check("OPTIONS http://y HTTP/1.1\r\nhost: y\r\n\r\n", "OPTIONS * HTTP/1.1\r\nhost: y\r\n\r\n");
    }

    #[track_caller]
    fn rejected(head: &str, word: &str) {
        match HeadScanner::default().advance(head.as_bytes()) {
            Err(HeadProblem::Malformed(problem)) => assert!(problem.contains(word), "{head:?}: {problem}"),
            other => panic!("{head:?}: {other:?}"),
        }
        check(head.as_bytes(), HeadScanner::default().advance(head.as_bytes()));
    }

    #[test]
    fn a_head_ends_at_its_blank_line_and_later_bytes_are_ignored() {
        let check = |head: &str| {
            let is_chunked = head.contains("CHUNKED");
            let is_absolute = head.contains("http://");
            check(head.as_bytes(), Ok(Some(ScannedHead { length: head.len(), is_chunked, is_absolute })));
        };
        check("GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n");
        check("\r\nGET / HTTP/1.1\r\nHost:\r\n\r\n");
        check("POST / HTTP/1.1\r\nhost: [::1]:80\r\ncontent-length: 9223372036854775807\r\n\r\n");
        check("POST http://x/embed HTTP/1.1\r\nhost: x\r\nTransfer-Encoding:\tCHUNKED \r\n\r\n");
        check("GET / HTTP/1.0\r\n\r\n");
        check("OPTIONS * HTTP/1.1\r\nhost: x\r\nx-empty:\r\nx-latin: \u{e9}\r\n\r\n");
        let one = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";
        assert_eq!(length(format!("{one}\n\0\r{one}").as_bytes()), Ok(Some(one.len())));
        for end in 0..one.len() {
            assert_eq!(HeadScanner::default().advance(&one.as_bytes()[..end]), Ok(None), "{end}");
        }
    }

    #[test]
    fn an_ambiguous_head_is_rejected() {
        let with = |fields: &str| format!("POST / HTTP/1.1\r\nhost: x\r\n{fields}\r\n\r\n");
        rejected(&with("content-length: 5\r\ntransfer-encoding: chunked"), "both");
        rejected(&with("transfer-encoding: chunked\r\ncontent-length: 5"), "both");
        rejected(&with("content-length: 5\r\ncontent-length: 6"), "two content-lengths");
        rejected(&with("content-length: 5\r\nContent-Length: 5"), "two content-lengths");
        rejected(&with("content-length: 5, 5"), "not a number");
        rejected(&with("content-length: +5"), "not a number");
        rejected(&with("content-length: 0x5"), "not a number");
        rejected(&with("content-length:"), "not a number");
        rejected(&with("content-length: 9223372036854775808"), "not a number");
        rejected(&with("transfer-encoding: chunked\r\ntransfer-encoding: chunked"), "two transfer-encodings");
        rejected(&with("host: y"), "two hosts");
        rejected("GET / HTTP/1.1\r\n\r\n", "no host");
        rejected("GET / HTTP/1.1\r\nhost: a, b\r\n\r\n", "not allowed in hosts");
        rejected("GET / HTTP/1.1\r\nhost: a@b\r\n\r\n", "not allowed in hosts");
        rejected("POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", "HTTP/1.0");
        rejected(&with("x: a\rb"), "CR");
        rejected(&with("x: a\r\r"), "CR");
        rejected(&with("x: a\ny: b"), "LF");
        rejected(&with("x: a\r\n b"), "obs-fold");
        rejected(&with("x : a"), "space");
        rejected(&with(": a"), "token");
        rejected(&with("x"), "no colon");
        rejected(&with("x: \0"), "control");
        rejected(&with("x: \x7f"), "control");
        for coding in ["gzip", "gzip, chunked", "chunked, gzip", "identity", "xchunked", ""] {
            let head = with(&format!("transfer-encoding: {coding}"));
            check(head.as_bytes(), Err(HeadProblem::UnknownCoding));
        }
    }

    #[test]
    fn a_request_line_is_not_repaired() {
        let line = |line: &str, word: &str| rejected(&format!("{line}\r\nhost: x\r\n\r\n"), word);
        line("GET /", "METHOD TARGET VERSION");
        line("GET  / HTTP/1.1", "METHOD TARGET VERSION");
        line("GET / HTTP/1.1 ", "METHOD TARGET VERSION");
        line(" GET / HTTP/1.1", "start with a method");
        line("G@T / HTTP/1.1", "method");
        line("GET /a b HTTP/1.1", "METHOD TARGET VERSION");
        line("GET /a\tb HTTP/1.1", "not allowed in targets");
        line("GET /\u{e9} HTTP/1.1", "not allowed in targets");
        line("GET /#part HTTP/1.1", "not allowed in targets");
        line("GET models HTTP/1.1", "neither a path");
        line("GET ftp://x/ HTTP/1.1", "neither a path");
        line("GET http:///path HTTP/1.1", "no host");
        line("GET http://user@x/ HTTP/1.1", "not allowed in hosts");
        line("GET http://a,b/ HTTP/1.1", "not allowed in hosts");
        line("GET / HTTP/2.0", "version");
        line("GET / HTTP/1.2", "version");
        line("GET / http/1.1", "version");
        line("PRI * HTTP/2.0", "version");
        rejected("\r\n\r\nGET / HTTP/1.1\r\n", "start with a method");
        rejected("\x16\x03\x01\x02\0\x01\0\x01\u{fc}", "start with a method");
    }

    #[test]
    fn limits_hold_and_one_past_them_does_not() {
        let padded = |length: usize| {
            let (start, end) = ("GET / HTTP/1.1\r\nhost: x\r\nx: ", "\r\n\r\n");
            format!("{start}{}{end}", "a".repeat(length - start.len() - end.len()))
        };
        assert_eq!(length(padded(HEAD_BYTES_MAX).as_bytes()), Ok(Some(HEAD_BYTES_MAX)));
        assert_eq!(
            HeadScanner::default().advance(padded(HEAD_BYTES_MAX + 1).as_bytes()),
            Err(HeadProblem::TooLong)
        );
        let endless = "a".repeat(HEAD_BYTES_MAX + 1);
        assert_eq!(HeadScanner::default().advance(&endless.as_bytes()[..HEAD_BYTES_MAX]), Ok(None));
        assert_eq!(HeadScanner::default().advance(endless.as_bytes()), Err(HeadProblem::TooLong));

        let target = |length: usize| format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "a".repeat(length - 1));
        assert!(matches!(HeadScanner::default().advance(target(TARGET_BYTES_MAX).as_bytes()), Ok(Some(_))));
        let past = HeadScanner::default().advance(target(TARGET_BYTES_MAX + 1).as_bytes());
        assert_eq!(past, Err(HeadProblem::TargetTooLong));

        let fields =
            |count: usize| format!("GET / HTTP/1.1\r\nhost: x\r\n{}\r\n", "a: b\r\n".repeat(count - 1));
        assert!(matches!(HeadScanner::default().advance(fields(FIELDS_MAX).as_bytes()), Ok(Some(_))));
        assert_eq!(
            HeadScanner::default().advance(fields(FIELDS_MAX + 1).as_bytes()),
            Err(HeadProblem::TooManyFields)
        );
    }

    proptest! {
        /// The result does not depend on how the bytes are split.
        #[test]
        fn the_result_does_not_depend_on_how_the_bytes_are_split(
            head in proptest::collection::vec(proptest::sample::select(&b"GET /h:ost1.\r\n\0 cl"[..]), 0..80),
            cut in 0_usize..80,
        ) {
            let head = [b"GET / HTTP/1.1\r\nhost: x\r\n".as_slice(), &head].concat();
            let whole = HeadScanner::default().advance(&head);
            let mut scan = HeadScanner::default();
            let first = scan.advance(&head[..cut.min(head.len())]);
            let pieces = if first == Ok(None) { scan.advance(&head) } else { first };
            prop_assert_eq!(pieces, whole);
        }
    }
}
