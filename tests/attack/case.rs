//! Attacks as data: the bytes to send and the expected outcome.

use std::time::Duration;

/// One attack.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// Family and number or words.
    pub(crate) name: String,
    pub(crate) steps: Vec<Step>,
    pub(crate) expected: Expected,
}

/// Step of an attack.
#[derive(Clone, Debug, Hash)]
pub(crate) enum Step {
    /// Sends bytes.
    Send(Vec<u8>),
    /// Sends the same bytes repeatedly.
    Repeat(Vec<u8>, usize),
    /// Sends bytes one by one, with a pause after each.
    Trickle(Vec<u8>, Duration),
    /// Waits.
    Pause(Duration),
    /// Half-closes the connection, and continues reading.
    HalfClose,
    /// Closes the connection without reading what is still received.
    Abort,
    /// Begins HTTP/2: exchanges preface and SETTINGS, with these settings.
    Handshake(Vec<(u16, u32)>),
}

/// Expected responses.
#[derive(Clone, Debug)]
pub(crate) enum Expected {
    /// One HTTP/1 response per set, with a status of that set, and then the end of the connection.
    Statuses(Vec<&'static [u16]>),
    /// The first of these responses, at least one, and then the end of the connection.
    UpTo(Vec<&'static [u16]>),
    /// One HTTP/1 response to a HEAD request per set, without a body, and then the end of the connection.
    Heads(Vec<&'static [u16]>),
    /// The end of the connection, after at most one 4xx response.
    Closed,
    /// The end of the connection, without a 5xx response.
    NoServerError,
    /// No response: the attacker has disconnected.
    Nothing,
    /// One of these outcomes over HTTP/2.
    AnyOf(Vec<Outcome>),
}

/// Outcome of an attack over HTTP/2.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outcome {
    /// Response headers on stream 1, with one of these statuses.
    Status(&'static [u16]),
    /// A 2xx response on this stream.
    Served(u32),
    /// A reset of any stream by the server.
    Reset,
    /// GOAWAY with an error, or the end of the connection.
    ConnectionError,
}

/// The outcomes that RFC 9113 permits for a stream error: of the stream only, or of the connection.
pub(crate) const STREAM_ERROR: [Outcome; 3] =
    [Outcome::Reset, Outcome::ConnectionError, Outcome::Status(&[400])];

impl Case {
    /// Creates a case of bytes over HTTP/1, and the statuses of the responses until the connection ends.
    pub(crate) fn h1(
        name: impl Into<String>,
        bytes: impl Into<Vec<u8>>,
        responses: &[&'static [u16]],
    ) -> Case {
        let steps = vec![Step::Send(bytes.into())];
        Case { name: name.into(), steps, expected: Expected::Statuses(responses.to_vec()) }
    }

    /// Creates a case of HTTP/2 frames after a handshake, and the permitted outcomes.
    pub(crate) fn h2(name: impl Into<String>, frames: Vec<Vec<u8>>, outcomes: &[Outcome]) -> Case {
        let steps = vec![Step::Handshake(Vec::new()), Step::Send(frames.concat())];
        Case { name: name.into(), steps, expected: Expected::AnyOf(outcomes.to_vec()) }
    }

    pub(crate) fn new(name: impl Into<String>, steps: Vec<Step>, expected: Expected) -> Case {
        Case { name: name.into(), steps, expected }
    }
}

/// The key of the attackers' tenant.
pub(crate) const KEY: &str = "attack-key";
/// A request that is served.
pub(crate) const BODY: &str = r#"{"model": "anywhere", "input": "x"}"#;

/// A POST that is served, with further fields (each with its line end), after which the connection ends.
pub(crate) fn post(fields: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    head(&format!("connection: close\r\n{fields}content-length: {}\r\n", body.len()))
        .into_iter()
        .chain(body.iter().copied())
        .collect()
}

/// The head of a POST, with these fields.
pub(crate) fn head(fields: &str) -> Vec<u8> {
    format!("POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n{fields}\r\n")
        .into_bytes()
}

/// A request with this line, after which the connection ends.
pub(crate) fn line(line: &str) -> Vec<u8> {
    format!("{line}\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n\r\n").into_bytes()
}
