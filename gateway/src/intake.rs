//! Reads requests' bodies whole, each within its bound and all of them within another.
//!
//! A body is kept until its request is answered, because another region may have to be given it. So what is kept at
//! once is bounded too: when there is no room left, a request is refused before its body is read, and the client is told
//! to wait, instead of everybody being told nothing by a process that ran out of memory.

use bytes::{Bytes, BytesMut};
use http::Version;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, EXPECT};
use pingora::ErrorType;
use pingora::protocols::http::ServerSession;
use replica_core::wire::error::ErrorCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::compress;
use crate::metrics::{NotTaken, Tally};
use crate::respond::Refusal;
use gateway_core::encoding::{self, Coding};

/// The largest body that is taken: 2,048 inputs of 8,191 tokens, at two bytes a token. The field's gateways break
/// between 32 KiB and 2 MiB.
pub(crate) const BODY_BYTES_MAX: usize = 32 << 20;
/// What all bodies together may take: sixteen of the largest, or some hundred thousand of the usual.
pub(crate) const BODIES_BYTES_MAX: usize = 512 << 20;
/// Room is given out in pieces of this size.
const PIECE_BYTES: usize = 1 << 10;

/// Where bodies are kept.
pub(crate) struct Intake {
    room: Arc<Semaphore>,
    /// How long a body may take to arrive.
    time: Duration,
    /// Bodies that were not taken.
    pub(crate) not_taken: Tally<NotTaken>,
}

/// A body, and its place.
pub(crate) struct Body {
    pub(crate) bytes: Bytes,
    _place: OwnedSemaphorePermit,
}

impl Body {
    /// What takes up this place until it is dropped.
    pub(crate) fn new(bytes: Bytes, place: OwnedSemaphorePermit) -> Body {
        Body { bytes, _place: place }
    }
}

/// Why there is no body.
#[derive(Debug)]
pub(crate) enum NoBody {
    /// Tell the client.
    Refused(Refusal),
    /// There is nobody to tell.
    ClientGone,
}

impl Intake {
    pub(crate) fn new(time: Duration) -> Intake {
        Intake {
            room: Arc::new(Semaphore::new(BODIES_BYTES_MAX / PIECE_BYTES)),
            time,
            not_taken: Tally::default(),
        }
    }

    /// How many bytes of [`BODIES_BYTES_MAX`] nobody has.
    pub(crate) fn room(&self) -> usize {
        self.room.available_permits() * PIECE_BYTES
    }

    /// The body of the request whose head `session` has read, unpacked.
    pub(crate) async fn body(&self, session: &mut ServerSession) -> Result<Body, NoBody> {
        let taken = self.taken(session).await;
        if let Err(NoBody::Refused(refusal)) = &taken {
            match refusal.code {
                ErrorCode::Overloaded => self.not_taken.count(NotTaken::NoRoom),
                ErrorCode::BodyTooLarge => self.not_taken.count(NotTaken::TooLarge),
                ErrorCode::BodyTimeout => self.not_taken.count(NotTaken::TooSlow),
                // Chunks, a coding that is not spoken, or what is not in it.
                _ => self.not_taken.count(NotTaken::Malformed),
            }
        }
        taken
    }

    async fn taken(&self, session: &mut ServerSession) -> Result<Body, NoBody> {
        let coding = session.get_header(CONTENT_ENCODING).map(http::HeaderValue::as_bytes);
        let several = session.req_header().headers.get_all(CONTENT_ENCODING).iter().nth(1).is_some();
        match encoding::of_content(coding).filter(|_| !several) {
            Some(Coding::Identity) => self.as_sent(session).await,
            Some(Coding::Gzip) => {
                let packed = self.as_sent(session).await?;
                compress::unpack(self, packed).await
            }
            None => Err(compress::unknown()),
        }
    }

    async fn as_sent(&self, session: &mut ServerSession) -> Result<Body, NoBody> {
        let declared = session.get_header(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        if let Some(length) = declared.filter(|length| *length > BODY_BYTES_MAX) {
            return Err(too_large(&format!("has {length} bytes")));
        }
        let place = self.place(declared.unwrap_or(0))?;
        // Over HTTP/2 nobody is told to go on (RFC 9110, 10.1.1 would have it): `h2` could send the interim answer
        // (`SendResponse::send_informational`), Pingora's session keeps that to itself and drops every 1xx. A client must
        // not wait for it for ever and none does; and one that is refused hears so before it has sent more than its window.
        let waits = session.req_header().version == Version::HTTP_11
            && session.get_header_bytes(EXPECT).eq_ignore_ascii_case(b"100-continue");
        if waits {
            session.write_continue_response().await.map_err(|_| NoBody::ClientGone)?;
        }
        tokio::time::timeout(self.time, self.read(session, declared.unwrap_or(0), place))
            .await
            .unwrap_or_else(|_| Err(self.too_slow()))
    }

    fn too_slow(&self) -> NoBody {
        let seconds = self.time.as_secs_f64();
        let message =
            format!("The body did not arrive within {seconds} s; send it faster or in smaller requests.");
        NoBody::Refused(Refusal::new(ErrorCode::BodyTimeout, message))
    }

    /// Reads until the end; a body whose length nobody declared takes its place as it comes.
    async fn read(
        &self,
        session: &mut ServerSession,
        declared: usize,
        mut place: OwnedSemaphorePermit,
    ) -> Result<Body, NoBody> {
        let mut body = BytesMut::with_capacity(declared.min(1 << 20));
        while let Some(chunk) = session.read_request_body().await.or_else(|error| broken(session, &error))? {
            if body.len() + chunk.len() > BODY_BYTES_MAX {
                return Err(too_large("has more"));
            }
            body.extend_from_slice(&chunk);
            self.widen(&mut place, body.len())?;
        }
        Ok(Body::new(body.freeze(), place))
    }

    /// Takes what is missing of the room for `bytes`.
    pub(crate) fn widen(&self, place: &mut OwnedSemaphorePermit, bytes: usize) -> Result<(), NoBody> {
        let missing = bytes.saturating_sub(place.num_permits() * PIECE_BYTES);
        if missing > 0 {
            place.merge(self.place(missing)?);
        }
        Ok(())
    }

    /// Room for `bytes`.
    pub(crate) fn place(&self, bytes: usize) -> Result<OwnedSemaphorePermit, NoBody> {
        let pieces = u32::try_from(bytes.div_ceil(PIECE_BYTES)).expect("a body is no larger than its bound");
        self.room.clone().try_acquire_many_owned(pieces).map_err(|_| {
            let message =
                format!("The bodies under way take {BODIES_BYTES_MAX} bytes, all that there is room for.");
            NoBody::Refused(Refusal::new(ErrorCode::Overloaded, message))
        })
    }
}

/// Why a body cannot be read to its end: whoever sent it is gone, or has sent what is none. After that nobody knows where
/// the next request would begin.
///
/// Chunks are read by Pingora with `httparse`, which takes any octet in a chunk's extension, a bare line feed too, where RFC
/// 9112 (7.1.1) has tokens and quoted strings. Nothing of an extension is passed on from here.
fn broken(session: &mut ServerSession, error: &pingora::Error) -> Result<Option<Bytes>, NoBody> {
    tracing::debug!(%error, "a body cannot be read");
    if session.is_http2() || matches!(error.etype(), ErrorType::ConnectionClosed | ErrorType::ReadError) {
        return Err(NoBody::ClientGone);
    }
    session.set_keepalive(None);
    Err(NoBody::Refused(Refusal::new(
        ErrorCode::MalformedRequest,
        "The chunks of the body are not as RFC 9112 (7.1) has them; the connection is closed.",
    )))
}

pub(crate) fn too_large(given: &str) -> NoBody {
    NoBody::Refused(Refusal::new(
        ErrorCode::BodyTooLarge,
        format!(
            "A body may have {BODY_BYTES_MAX} bytes and this one {given}; split the inputs over several requests."
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_given_up_to_its_bound_and_comes_back() {
        let intake = Intake::new(Duration::from_secs(60));
        let largest: Vec<_> =
            (0..BODIES_BYTES_MAX / BODY_BYTES_MAX).map(|_| intake.place(BODY_BYTES_MAX)).collect();
        assert!(largest.iter().all(Result::is_ok));
        let refused = intake.place(1);
        assert!(
            matches!(&refused, Err(NoBody::Refused(refusal)) if refusal.code == ErrorCode::Overloaded),
            "{refused:?}"
        );
        drop(largest);
        assert!(intake.place(1).is_ok());
    }
}
