//! Values of the keys and variables that are parsed in the same way: URLs, lists of pairs, numbers.

use http::{HeaderName, HeaderValue, Uri};
use percent_encoding::percent_decode_str;
use std::str::FromStr;
use std::time::Duration;

/// Maximum number of headers of an export, and of attributes of the process.
pub(super) const PAIRS_MAX: usize = 64;
/// Headers of the connection or of the length of a body, which HTTP/2 forbids or which the client writes itself. With another
/// value, the collector reads the next export at the wrong place, or none.
const CONNECTION_HEADERS: [&str; 8] = [
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "transfer-encoding",
    "upgrade",
];

/// Timeout in milliseconds, as a variable has it.
pub(super) struct Millis(pub(super) Duration);

impl FromStr for Millis {
    type Err = String;

    fn from_str(text: &str) -> Result<Millis, String> {
        match text.parse() {
            Ok(millis @ 1..=60_000) => Ok(Millis(Duration::from_millis(millis))),
            Ok(_) | Err(_) => Err(format!("{text:?} is not a timeout; write milliseconds, 1 to 60000")),
        }
    }
}

/// Share of the traces, as a variable has it.
pub(super) struct Ratio(pub(super) f64);

impl FromStr for Ratio {
    type Err = String;

    fn from_str(text: &str) -> Result<Ratio, String> {
        match text.parse() {
            Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(Ratio(ratio)),
            Ok(_) | Err(_) => Err(format!("{text:?} is not a share; write a number from 0 to 1")),
        }
    }
}

/// Parses the URL of a collector, and appends a path.
pub(super) fn url(text: &str, path: Option<&str>) -> Result<Uri, String> {
    // These are not shown, also if they cannot be parsed: there may be a password or a key.
    if text.contains('@') {
        return Err("a URL of a collector has no user and no @; write its key into headers_file".to_owned());
    }
    if text.contains(['?', '#']) {
        return Err(
            "a URL of a collector has no query and no fragment; remove \"?\" or \"#\" and what follows, and write \
             its key into headers_file"
                .to_owned(),
        );
    }
    let invalid = || {
        format!("{text:?} is not the URL of a collector; write \"http://HOST:PORT\" or \"https://HOST:PORT\"")
    };
    let parsed: Uri = text.parse().map_err(|_| invalid())?;
    let has_scheme = matches!(parsed.scheme_str(), Some("http" | "https"));
    let authority = parsed.authority().filter(|authority| has_scheme && !authority.host().is_empty());
    let authority = authority.ok_or_else(invalid)?;
    // `Uri` takes a port that is no number of 16 bits for none, which is port 80 or 443.
    let port = authority.as_str().strip_prefix(authority.host()).unwrap_or_default();
    if !port.is_empty() && port.strip_prefix(':').is_none_or(|port| !is_port(port)) {
        return Err(format!(
            "{text:?} has a port that is not a number from 1 to 65535; write \"http://HOST:PORT\", such as \
             \"http://127.0.0.1:4318\""
        ));
    }
    match path {
        Some(path) => format!("{}{path}", text.trim_end_matches('/')).parse().map_err(|_| invalid()),
        None => Ok(parsed),
    }
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok_and(|port| port > 0)
}

/// Parses `name=value,name=value`; values are percent-encoded. The error does not show them.
pub(super) fn pairs(text: &str) -> Result<Vec<(String, String)>, String> {
    let entries = || text.trim().split(',').map(str::trim).filter(|entry| !entry.is_empty());
    if entries().count() > PAIRS_MAX {
        return Err(format!("has more than {PAIRS_MAX} entries; write fewer"));
    }
    let read = |entry: &str| {
        let (name, value) = entry.split_once('=')?;
        let (name, value) = (name.trim(), percent_decode_str(value.trim()).decode_utf8().ok()?);
        let is_valid = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic());
        let is_text = !value.bytes().any(|byte| byte.is_ascii_control());
        (is_valid && is_text).then(|| (name.to_owned(), value.into_owned()))
    };
    let wrong =
        |index: usize| format!("entry {} is not `name=value`; write name=value,name=value", index + 1);
    entries().enumerate().map(|(index, entry)| read(entry).ok_or_else(|| wrong(index))).collect()
}

/// Parses headers, `name=value,name=value`. The error shows no value, and only names that are no secret.
pub(super) fn headers(text: &str) -> Result<Vec<(HeaderName, HeaderValue)>, String> {
    let read = |(index, (name, value)): (usize, (String, String))| {
        let entry = index + 1;
        // The exporter takes no bytes beyond ASCII.
        let value = HeaderValue::from_str(&value).ok().filter(|_| value.is_ascii());
        let (Ok(name), Some(mut value)) = (HeaderName::try_from(name), value) else {
            return Err(format!(
                "entry {entry} has a name or a value that HTTP does not permit; write name=value, with letters, digits \
                 and \"-\" in the name, and a value of ASCII characters"
            ));
        };
        if CONNECTION_HEADERS.contains(&name.as_str()) {
            return Err(format!(
                "entry {entry} is the header {name}, which the HTTP client writes itself; remove it"
            ));
        }
        value.set_sensitive(true);
        Ok((name, value))
    };
    pairs(text)?.into_iter().enumerate().map(read).collect()
}
