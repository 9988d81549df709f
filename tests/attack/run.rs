//! Runs one case and checks its outcome.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::case::{Case, Expected, Outcome, Step};
use crate::frames::{self, ACK, GOAWAY, HEADERS, PREFACE, RST_STREAM, SETTINGS, frame, settings};
use crate::responses::{ConnectionEnd, read_to_end, statuses};

/// Maximum time from the last step to the end of a case. The longest timeout of the gateway is that of a body,
/// [`crate::processes::BODY_TIMEOUT`].
const TIMEOUT: Duration = Duration::from_secs(12);
/// Timeout of a write to a gateway that does not read.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the case; the error describes an unexpected end.
pub(crate) fn run_and_check(address: SocketAddr, case: &Case) -> Result<(), String> {
    let mut stream = TcpStream::connect(address).map_err(|error| format!("no connection: {error}"))?;
    stream.set_nodelay(true).unwrap();
    stream.set_write_timeout(Some(WRITE_TIMEOUT)).unwrap();
    for step in &case.steps {
        // In many cases the server closes the connection early.
        if perform(&mut stream, step).is_err() {
            break;
        }
    }
    let deadline = Instant::now() + TIMEOUT;
    match &case.expected {
        Expected::Nothing => Ok(()),
        Expected::AnyOf(outcomes) => any_of(&mut stream, outcomes, deadline),
        Expected::Statuses(sets) => responses(&mut stream, sets, false, deadline),
        Expected::UpTo(sets) => {
            let (bytes, _) = read_to_end(&mut stream, deadline);
            let found = statuses(&bytes, false).unwrap_or_default();
            let fits = !found.is_empty()
                && found.len() <= sets.len()
                && found.iter().zip(sets).all(|(status, set)| set.contains(status));
            if fits { Ok(()) } else { Err(format!("responded {found:?}, which does not begin {sets:?}")) }
        }
        Expected::Heads(sets) => responses(&mut stream, sets, true, deadline),
        Expected::Closed => closed(&mut stream, deadline, |status| (400..500).contains(&status)),
        Expected::NoServerError => {
            closed(&mut stream, deadline, |status| status < 500 || status == 501 || status == 505)
        }
    }
}

fn perform(stream: &mut TcpStream, step: &Step) -> std::io::Result<()> {
    match step {
        Step::Send(bytes) => stream.write_all(bytes),
        Step::Repeat(bytes, times) => {
            // In larger chunks, so that the attacker is not the bottleneck.
            let per_piece = (64 << 10) / bytes.len().max(1) + 1;
            let piece = bytes.repeat(per_piece.min(*times));
            let mut left = *times * bytes.len();
            while left > 0 {
                let length = piece.len().min(left);
                stream.write_all(&piece[..length])?;
                left -= length;
            }
            Ok(())
        }
        Step::Trickle(bytes, gap) => bytes.iter().try_for_each(|byte| {
            stream.write_all(&[*byte])?;
            std::thread::sleep(*gap);
            Ok(())
        }),
        Step::Pause(time) => {
            std::thread::sleep(*time);
            Ok(())
        }
        Step::HalfClose => stream.shutdown(Shutdown::Write),
        // The socket is dropped: the kernel resets the connection if data was not read or still arrives.
        Step::Abort => Err(std::io::Error::other("gone")),
        Step::Handshake(requested) => {
            stream.write_all(&[PREFACE, &settings(requested)].concat())?;
            let deadline = Instant::now() + TIMEOUT;
            loop {
                match frames::read(stream, deadline).map_err(std::io::Error::other)? {
                    Some(frame) if frame.kind == SETTINGS && frame.flags & ACK == 0 => break,
                    Some(_) => {}
                    None => return Err(std::io::Error::other("no handshake")),
                }
            }
            stream.write_all(&frame(SETTINGS, ACK, 0, []))
        }
    }
}

fn responses(
    stream: &mut TcpStream,
    sets: &[&'static [u16]],
    without_bodies: bool,
    deadline: Instant,
) -> Result<(), String> {
    let (bytes, end) = read_to_end(stream, deadline);
    let shown = || String::from_utf8_lossy(&bytes[..bytes.len().min(300)]).into_owned();
    let Some(found) = statuses(&bytes, without_bodies) else {
        return Err(format!("the received bytes are not complete responses ({end:?}): {:?}", shown()));
    };
    let fits = found.len() == sets.len() && found.iter().zip(sets).all(|(status, set)| set.contains(status));
    if !fits {
        return Err(format!("responded {found:?} instead of {sets:?} ({end:?}): {:?}", shown()));
    }
    if end != ConnectionEnd::Closed {
        return Err(format!("responded {found:?}, and the connection stays open"));
    }
    Ok(())
}

fn closed(stream: &mut TcpStream, deadline: Instant, may: impl Fn(u16) -> bool) -> Result<(), String> {
    let (bytes, end) = read_to_end(stream, deadline);
    let found = statuses(&bytes, false).unwrap_or_default();
    if let Some(status) = found.iter().find(|status| !may(**status)) {
        return Err(format!(
            "responded {status}: {:?}",
            String::from_utf8_lossy(&bytes[..bytes.len().min(300)])
        ));
    }
    if end == ConnectionEnd::Closed {
        Ok(())
    } else {
        Err(format!("no end of the connection after {found:?}"))
    }
}

fn any_of(stream: &mut TcpStream, outcomes: &[Outcome], deadline: Instant) -> Result<(), String> {
    let mut result = Vec::new();
    loop {
        let frame = match frames::read(stream, deadline) {
            Ok(Some(frame)) => frame,
            Ok(None) if outcomes.iter().any(|outcome| matches!(outcome, Outcome::ConnectionError)) => {
                return Ok(());
            }
            Ok(None) => return Err(format!("the connection ended after {result:?}")),
            Err(hangs) => return Err(format!("{hangs} after {result:?}")),
        };
        let (kind, on) = (frame.kind, frame.stream);
        let status = (kind == HEADERS).then(|| frame.status()).flatten();
        let error = frame.error().filter(|error| kind == RST_STREAM || *error != 0);
        let fits = outcomes.iter().any(|outcome| match outcome {
            Outcome::Status(set) => on == 1 && status.is_some_and(|status| set.contains(&status)),
            Outcome::Served(stream) => on == *stream && status == Some(200),
            Outcome::Reset => kind == RST_STREAM,
            Outcome::ConnectionError => kind == GOAWAY && error.is_some(),
        });
        if fits {
            return Ok(());
        }
        match kind {
            HEADERS if status.is_some_and(|status| status >= 500) => {
                return Err(format!("responded {status:?} on stream {on} after {result:?}"));
            }
            HEADERS => result.push(format!("{status:?} on {on}")),
            RST_STREAM | GOAWAY => result.push(format!("kind {kind} with {:?} on {on}", frame.error())),
            _ => {}
        }
    }
}
