//! Reader of HTTP/1 responses up to the end of the connection.

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::time::Instant;

/// Result of waiting for the end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionEnd {
    /// With FIN or a reset.
    Closed,
    /// The connection did not end in time.
    Hangs,
}

/// Reads everything until the connection ends or it is `deadline`.
pub(crate) fn read_to_end(stream: &mut TcpStream, deadline: Instant) -> (Vec<u8>, ConnectionEnd) {
    let mut bytes = Vec::new();
    let mut piece = [0; 16 << 10];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return (bytes, ConnectionEnd::Hangs);
        }
        stream.set_read_timeout(Some(left)).unwrap();
        match stream.read(&mut piece) {
            Ok(0) => return (bytes, ConnectionEnd::Closed),
            Ok(n) => bytes.extend_from_slice(&piece[..n]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return (bytes, ConnectionEnd::Hangs);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return (bytes, ConnectionEnd::Closed),
        }
    }
}

/// Returns the statuses of the consecutive responses in `bytes`; `None` if the bytes are not complete responses.
pub(crate) fn statuses(mut bytes: &[u8], without_bodies: bool) -> Option<Vec<u16>> {
    let mut statuses = Vec::new();
    while !bytes.is_empty() {
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
        let head = std::str::from_utf8(&bytes[..end]).ok()?.to_ascii_lowercase();
        bytes = &bytes[end..];
        let status: u16 = head.strip_prefix("http/1.1 ")?.get(..3)?.parse().ok()?;
        if status == 100 {
            continue;
        }
        statuses.push(status);
        if without_bodies {
            continue;
        }
        let field = |name: &str| head.split("\r\n").find_map(|line| line.strip_prefix(name)).map(str::trim);
        bytes = match field("content-length:") {
            Some(length) => bytes.get(length.parse::<usize>().ok()?..)?,
            None if field("transfer-encoding:").is_some() => behind_chunks(bytes)?,
            None => &[],
        };
    }
    Some(statuses)
}

fn behind_chunks(mut bytes: &[u8]) -> Option<&[u8]> {
    loop {
        let end = bytes.windows(2).position(|two| two == b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).ok()?, 16).ok()?;
        bytes = bytes.get(end + 2 + size + 2..)?;
        if size == 0 {
            return Some(bytes);
        }
    }
}
