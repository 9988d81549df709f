//! The head of an HTTP/1 request, looked at before any parser acts on it.
//!
//! A proxy is attacked through what it and its neighbours read differently: two lengths, a length and a transfer coding,
//! a lone CR that one takes for the end of a line and another for part of a value. Parsers are made to be forgiving (ours
//! drops a length beside a transfer coding, repairs a broken request line, takes a lone LF, and reads a megabyte); so what
//! RFC 9112 lets a server refuse is refused here, before the parser sees it, and what is let through has one reading.
//!
//! [`Scan`] is fed the buffer as it grows and looks at each byte once, whatever the size of the pieces in which it came.
//! It knows nothing of what headers mean beyond those that say where a message ends and for whom it is.

use memchr::{memchr, memchr_iter};

/// Bytes that a head may have, with its blank line: what nginx (four of 8 KiB) and Envoy (60 KiB) let through, and more
/// than any key, token and trace context together.
pub const HEAD_BYTES_MAX: usize = 64 << 10;
/// Bytes that a request target may have. Paths of ours have less than a hundred; RFC 9112 (3) asks for 8,000.
pub const TARGET_BYTES_MAX: usize = 8 << 10;
/// Lines of a head that are fields. Browsers send 20; a chain of proxies adds as many.
pub const FIELDS_MAX: usize = 100;
/// Blank lines before a request that are skipped (RFC 9112, 2.2, for clients that end a body with one too many).
const BLANK_LINES_MAX: u8 = 1;

/// Why a head is refused; the connection cannot be used any further.
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
    /// Not HTTP/1.1 as RFC 9112 has it; the sentence goes on from "The request cannot be read: ".
    Malformed(&'static str),
}

/// What was seen of a head so far.
#[derive(Clone, Debug, Default)]
pub struct Scan {
    /// Where the line starts that is not whole yet.
    line: usize,
    /// Up to where line ends were looked for.
    searched: usize,
    blank_lines: u8,
    version: Option<Version>,
    fields: usize,
    host: bool,
    length: bool,
    coding: bool,
    absolute: bool,
}

/// A head that is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Its bytes, with the blank line.
    pub length: usize,
    /// The body comes in chunks.
    pub is_chunked: bool,
    /// Its target is a whole URL, which [`origin_form`] takes apart.
    pub is_absolute: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    Http10,
    Http11,
}

type Checked<T> = Result<T, HeadProblem>;

impl Scan {
    /// Goes on where it stopped: `bytes` is everything that came since the last request, which begins as it did before.
    /// Gives the head once it is whole.
    ///
    /// # Errors
    ///
    /// As soon as it is known that the head is none, which may be before its end.
    pub fn go_on(&mut self, bytes: &[u8]) -> Checked<Option<Head>> {
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
        // What is no HTTP at all (a TLS handshake, say) may never send a line end to wait for.
        let begun = bytes.get(self.line).copied();
        if self.version.is_none() && begun.is_some_and(|byte| byte != b'\r' && !is_token(byte)) {
            return Err(HeadProblem::Malformed("it does not begin with a method"));
        }
        Ok(None)
    }

    fn field(&mut self, line: &[u8]) -> Checked<()> {
        self.fields += 1;
        if self.fields > FIELDS_MAX {
            return Err(HeadProblem::TooManyFields);
        }
        if line.starts_with(b" ") || line.starts_with(b"\t") {
            return Err(HeadProblem::Malformed("a field goes on in a second line (obs-fold)"));
        }
        let colon = memchr(b':', line).ok_or(HeadProblem::Malformed("a line of the head has no colon"))?;
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if name.is_empty() || !name.iter().copied().all(is_token) {
            return Err(HeadProblem::Malformed(
                "the name of a field is no token, or a space stands before its colon",
            ));
        }
        // All of them, without a branch for each.
        let control = |byte: u8| (byte < b' ' && byte != b'\t') || byte == 0x7f;
        if value.iter().fold(false, |found, byte| found | control(*byte)) {
            return Err(HeadProblem::Malformed("a field has a control character"));
        }
        if name.eq_ignore_ascii_case(b"host") {
            once(&mut self.host, "there are two hosts")?;
            return host(value);
        }
        if name.eq_ignore_ascii_case(b"content-length") {
            once(&mut self.length, "there are two content-lengths")?;
            return length(value);
        }
        if name.eq_ignore_ascii_case(b"transfer-encoding") {
            once(&mut self.coding, "there are two transfer-encodings")?;
            return if value.eq_ignore_ascii_case(b"chunked") {
                Ok(())
            } else {
                Err(HeadProblem::UnknownCoding)
            };
        }
        Ok(())
    }

    fn end(&self, version: Version) -> Checked<Head> {
        if self.coding && self.length {
            return Err(HeadProblem::Malformed("it has both a content-length and a transfer-encoding"));
        }
        match version {
            Version::Http10 if self.coding => {
                Err(HeadProblem::Malformed("HTTP/1.0 has no transfer-encoding"))
            }
            Version::Http11 if !self.host => Err(HeadProblem::Malformed("there is no host")),
            Version::Http10 | Version::Http11 => {
                Ok(Head { length: self.line, is_chunked: self.coding, is_absolute: self.absolute })
            }
        }
    }
}

/// `method SP target SP version`, and nothing that somebody would have to repair; with whether the target is a whole URL.
fn request_line(line: &[u8]) -> Checked<(Version, bool)> {
    if !line.first().copied().is_some_and(is_token) {
        return Err(HeadProblem::Malformed("it does not begin with a method"));
    }
    let mut parts = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(HeadProblem::Malformed("the first line is not 'METHOD TARGET VERSION'"));
    };
    if method.is_empty() || !method.iter().copied().all(is_token) {
        return Err(HeadProblem::Malformed("the method is no token"));
    }
    if target.len() > TARGET_BYTES_MAX {
        return Err(HeadProblem::TargetTooLong);
    }
    if target.is_empty() || !target.iter().all(|byte| matches!(byte, b'!'..=b'~') && *byte != b'#') {
        return Err(HeadProblem::Malformed("the target has a byte that no target has"));
    }
    // RFC 9112 (3.2): a path, a whole URL (asked of proxies), `*` of OPTIONS, `host:port` of CONNECT.
    let behind_scheme = behind_scheme(target);
    if let Some(rest) = behind_scheme {
        authority(rest)?;
    }
    if !(target[0] == b'/' || behind_scheme.is_some() || target == b"*" || method == b"CONNECT") {
        return Err(HeadProblem::Malformed("the target is neither a path nor a URL"));
    }
    match version {
        b"HTTP/1.1" => Ok((Version::Http11, behind_scheme.is_some())),
        b"HTTP/1.0" => Ok((Version::Http10, behind_scheme.is_some())),
        _ => Err(HeadProblem::Malformed("the version is neither HTTP/1.1 nor HTTP/1.0")),
    }
}

/// What stands behind the scheme of a whole URL.
fn behind_scheme(target: &[u8]) -> Option<&[u8]> {
    [&b"http://"[..], b"https://"].iter().find_map(|scheme| {
        let (start, rest) = target.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some(rest)
    })
}

/// The authority of a URL, from behind its scheme, and what follows it.
fn authority(rest: &[u8]) -> Checked<(&[u8], &[u8])> {
    let end = rest.iter().position(|byte| matches!(byte, b'/' | b'?')).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    if authority.is_empty() {
        return Err(HeadProblem::Malformed("the URL of the target has no host"));
    }
    host(authority)?;
    if !is_host_and_port(authority) {
        return Err(HeadProblem::Malformed("the URL of the target has a host or a port that cannot be"));
    }
    Ok((authority, path))
}

/// Whether brackets are around all of an address, and what follows the host is a port (RFC 3986, 3.2.2 and 3.2.3).
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

/// The same head with the path of its target alone and the authority of its target as its host, whatever host it named
/// (RFC 9112, 3.2.2): `head` is whole, has been scanned and [is absolute](Head::is_absolute).
pub fn origin_form(head: &[u8]) -> Vec<u8> {
    let start = head.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(0);
    let mut lines = head[start..].split_inclusive(|byte| *byte == b'\n');
    let line = lines.next().unwrap_or_default();
    let mut parts = line.split(|byte| *byte == b' ');
    let (method, target) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let version = parts.next().unwrap_or_default();
    let Some(Ok((authority, path))) = behind_scheme(target).map(authority) else {
        return head.to_vec();
    };
    // Without a path it is the root; of OPTIONS it is the server (RFC 9112, 3.2.4).
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

fn once(seen: &mut bool, problem: &'static str) -> Checked<()> {
    if std::mem::replace(seen, true) { Err(HeadProblem::Malformed(problem)) } else { Ok(()) }
}

/// A name or address and perhaps a port; empty is allowed where a target has no authority (RFC 9112, 3.2).
fn host(value: &[u8]) -> Checked<()> {
    let fits = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~%:[]!$&'()*+;=".contains(byte);
    if value.iter().all(fits) {
        Ok(())
    } else {
        Err(HeadProblem::Malformed("the host has a byte that no host has"))
    }
}

/// Digits that a 63-bit number can hold, so that no reader counts in a type too small.
fn length(value: &[u8]) -> Checked<()> {
    let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    let number = std::str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok());
    match number {
        Some(_) if digits => Ok(()),
        _ => Err(HeadProblem::Malformed("the content-length is no number")),
    }
}

/// RFC 9110, 5.6.2.
pub(crate) fn is_token(byte: u8) -> bool {
    /// For each byte; every head has some hundred of them to look up.
    const TOKENS: [bool; 256] = {
        let (mut tokens, mut byte) = ([false; 256], 0);
        while byte < 256 {
            tokens[byte] = (byte as u8).is_ascii_alphanumeric();
            byte += 1;
        }
        let (marks, mut place) = (b"!#$%&'*+-.^_`|~", 0);
        while place < marks.len() {
            tokens[marks[place] as usize] = true;
            place += 1;
        }
        tokens
    };
    TOKENS[usize::from(byte)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What becomes of `head`, fed whole, and the same byte for byte.
    #[track_caller]
    fn check(head: &[u8], expected: Checked<Option<Head>>) {
        assert_eq!(Scan::default().go_on(head), expected, "{}", head.escape_ascii());
        let mut scan = Scan::default();
        let mut last = Ok(None);
        for end in 1..=head.len() {
            last = scan.go_on(&head[..end]);
            if last != Ok(None) {
                break;
            }
        }
        assert_eq!(last, expected, "byte for byte: {}", head.escape_ascii());
    }

    fn length(head: &[u8]) -> Checked<Option<usize>> {
        Scan::default().go_on(head).map(|head| head.map(|head| head.length))
    }

    #[test]
    fn a_whole_url_is_taken_apart_and_its_authority_is_the_host() {
        let check = |head: &str, expected: &str| {
            let scanned = Scan::default().go_on(head.as_bytes()).unwrap().unwrap();
            assert!(scanned.is_absolute, "{head:?}");
            assert_eq!(String::from_utf8(origin_form(head.as_bytes())).unwrap(), expected, "{head:?}");
            let again = Scan::default().go_on(expected.as_bytes()).unwrap().unwrap();
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
    fn refused(head: &str, word: &str) {
        match Scan::default().go_on(head.as_bytes()) {
            Err(HeadProblem::Malformed(problem)) => assert!(problem.contains(word), "{head:?}: {problem}"),
            other => panic!("{head:?}: {other:?}"),
        }
        check(head.as_bytes(), Scan::default().go_on(head.as_bytes()));
    }

    #[test]
    fn a_head_ends_at_its_blank_line_and_what_follows_is_not_looked_at() {
        let check = |head: &str| {
            let is_chunked = head.contains("CHUNKED");
            let is_absolute = head.contains("http://");
            check(head.as_bytes(), Ok(Some(Head { length: head.len(), is_chunked, is_absolute })));
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
            assert_eq!(Scan::default().go_on(&one.as_bytes()[..end]), Ok(None), "{end}");
        }
    }

    #[test]
    fn what_two_readers_could_read_in_two_ways_is_refused() {
        let with = |fields: &str| format!("POST / HTTP/1.1\r\nhost: x\r\n{fields}\r\n\r\n");
        refused(&with("content-length: 5\r\ntransfer-encoding: chunked"), "both");
        refused(&with("transfer-encoding: chunked\r\ncontent-length: 5"), "both");
        refused(&with("content-length: 5\r\ncontent-length: 6"), "two content-lengths");
        refused(&with("content-length: 5\r\nContent-Length: 5"), "two content-lengths");
        refused(&with("content-length: 5, 5"), "no number");
        refused(&with("content-length: +5"), "no number");
        refused(&with("content-length: 0x5"), "no number");
        refused(&with("content-length:"), "no number");
        refused(&with("content-length: 9223372036854775808"), "no number");
        refused(&with("transfer-encoding: chunked\r\ntransfer-encoding: chunked"), "two transfer-encodings");
        refused(&with("host: y"), "two hosts");
        refused("GET / HTTP/1.1\r\n\r\n", "no host");
        refused("GET / HTTP/1.1\r\nhost: a, b\r\n\r\n", "no host has");
        refused("GET / HTTP/1.1\r\nhost: a@b\r\n\r\n", "no host has");
        refused("POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", "HTTP/1.0");
        refused(&with("x: a\rb"), "CR");
        refused(&with("x: a\r\r"), "CR");
        refused(&with("x: a\ny: b"), "LF");
        refused(&with("x: a\r\n b"), "obs-fold");
        refused(&with("x : a"), "colon");
        refused(&with(": a"), "token");
        refused(&with("x"), "no colon");
        refused(&with("x: \0"), "control");
        refused(&with("x: \x7f"), "control");
        for coding in ["gzip", "gzip, chunked", "chunked, gzip", "identity", "xchunked", ""] {
            let head = with(&format!("transfer-encoding: {coding}"));
            check(head.as_bytes(), Err(HeadProblem::UnknownCoding));
        }
    }

    #[test]
    fn a_request_line_is_not_repaired() {
        let line = |line: &str, word: &str| refused(&format!("{line}\r\nhost: x\r\n\r\n"), word);
        line("GET /", "METHOD TARGET VERSION");
        line("GET  / HTTP/1.1", "METHOD TARGET VERSION");
        line("GET / HTTP/1.1 ", "METHOD TARGET VERSION");
        line(" GET / HTTP/1.1", "begin with a method");
        line("G@T / HTTP/1.1", "method");
        line("GET /a b HTTP/1.1", "METHOD TARGET VERSION");
        line("GET /a\tb HTTP/1.1", "no target has");
        line("GET /\u{e9} HTTP/1.1", "no target has");
        line("GET /#part HTTP/1.1", "no target has");
        line("GET models HTTP/1.1", "neither a path");
        line("GET ftp://x/ HTTP/1.1", "neither a path");
        line("GET http:///path HTTP/1.1", "no host");
        line("GET http://user@x/ HTTP/1.1", "no host has");
        line("GET http://a,b/ HTTP/1.1", "no host has");
        line("GET / HTTP/2.0", "version");
        line("GET / HTTP/1.2", "version");
        line("GET / http/1.1", "version");
        line("PRI * HTTP/2.0", "version");
        refused("\r\n\r\nGET / HTTP/1.1\r\n", "begin with a method");
        refused("\x16\x03\x01\x02\0\x01\0\x01\u{fc}", "begin with a method");
    }

    #[test]
    fn limits_hold_and_one_past_them_does_not() {
        let padded = |length: usize| {
            let (start, end) = ("GET / HTTP/1.1\r\nhost: x\r\nx: ", "\r\n\r\n");
            format!("{start}{}{end}", "a".repeat(length - start.len() - end.len()))
        };
        assert_eq!(length(padded(HEAD_BYTES_MAX).as_bytes()), Ok(Some(HEAD_BYTES_MAX)));
        assert_eq!(Scan::default().go_on(padded(HEAD_BYTES_MAX + 1).as_bytes()), Err(HeadProblem::TooLong));
        let endless = "a".repeat(HEAD_BYTES_MAX + 1);
        assert_eq!(Scan::default().go_on(&endless.as_bytes()[..HEAD_BYTES_MAX]), Ok(None));
        assert_eq!(Scan::default().go_on(endless.as_bytes()), Err(HeadProblem::TooLong));

        let target = |length: usize| format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "a".repeat(length - 1));
        assert!(matches!(Scan::default().go_on(target(TARGET_BYTES_MAX).as_bytes()), Ok(Some(_))));
        let past = Scan::default().go_on(target(TARGET_BYTES_MAX + 1).as_bytes());
        assert_eq!(past, Err(HeadProblem::TargetTooLong));

        let fields =
            |count: usize| format!("GET / HTTP/1.1\r\nhost: x\r\n{}\r\n", "a: b\r\n".repeat(count - 1));
        assert!(matches!(Scan::default().go_on(fields(FIELDS_MAX).as_bytes()), Ok(Some(_))));
        assert_eq!(Scan::default().go_on(fields(FIELDS_MAX + 1).as_bytes()), Err(HeadProblem::TooManyFields));
    }

    proptest! {
        /// However the bytes are cut, the finding is the same.
        #[test]
        fn a_finding_does_not_depend_on_how_the_bytes_came(
            head in proptest::collection::vec(proptest::sample::select(&b"GET /h:ost1.\r\n\0 cl"[..]), 0..80),
            cut in 0_usize..80,
        ) {
            let head = [b"GET / HTTP/1.1\r\nhost: x\r\n".as_slice(), &head].concat();
            let whole = Scan::default().go_on(&head);
            let mut scan = Scan::default();
            let first = scan.go_on(&head[..cut.min(head.len())]);
            let pieces = if first == Ok(None) { scan.go_on(&head) } else { first };
            prop_assert_eq!(pieces, whole);
        }
    }
}
