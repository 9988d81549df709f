//! Open streams of reports: how many a gateway has, and the memory of their messages.
//!
//! A gateway is a certificate, because each process has its own. What a stream says about its gateway is only used over
//! plaintext. The newest streams of a gateway are kept: of those on a path that has failed, the spoke learns only after a
//! while that they have ended, and the gateway has replaced them. A gateway without a stream would be blind, so a limit never
//! rejects one that has fewer streams than it may have, unless the limit of all gateways together is reached.
//!
//! Memory is counted beyond a few kilobytes of each stream, which idle messages need: what has arrived of a request, the
//! overflow that the next one may refer to, and the report until it is written. A stream whose message finds no memory ends.

use pingora::protocols::http::ServerSession;
use scheduler_api::report::stream::{REPORT_BYTES_MAX, REQUEST_BYTES_MAX, STREAMS_MAX};
use scheduler_api::report::{GATEWAYS_MAX, Gateway};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use supervision::Mutex;
use tokio::sync::Notify;

/// Maximum number of streams of one gateway: those of its process and of the one that it hands over to, and two that have been
/// replaced and whose end is unknown.
const GATEWAY_STREAMS_MAX: usize = 2 * STREAMS_MAX + 2;
/// Maximum number of streams of all gateways.
pub(super) const ALL_STREAMS_MAX: usize = STREAMS_MAX * GATEWAYS_MAX;
/// Bytes of each stream that are not counted: an idle message has some 20, and one with the overflow of twenty deployments or the
/// loads of ten less than 2 KiB.
const STREAM_BYTES_FREE: usize = 4 << 10;
/// Maximum bytes of the messages of one gateway: three times the largest ones on each stream of a process.
const GATEWAY_BYTES_MAX: usize = 64 << 20;
/// Maximum bytes of the messages of all gateways: complete reports of a thousand deployments to a thousand gateways at once.
const ALL_BYTES_MAX: usize = 256 << 20;
const _: () = assert!(
    GATEWAY_BYTES_MAX > STREAMS_MAX * (3 * REQUEST_BYTES_MAX + REPORT_BYTES_MAX),
    "the largest messages of a gateway have memory"
);

/// Owner of a stream.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum StreamOwner {
    /// The gateway with the certificate of this digest.
    Certificate(Vec<u8>),
    /// The gateway that a request over plaintext names.
    Reported(Gateway),
    /// Unknown, over plaintext before the first request.
    Unknown,
}

impl StreamOwner {
    /// Returns the maximum number of its streams.
    fn streams_max(&self) -> usize {
        match self {
            StreamOwner::Certificate(_) | StreamOwner::Reported(_) => GATEWAY_STREAMS_MAX,
            StreamOwner::Unknown => ALL_STREAMS_MAX,
        }
    }
}

/// Open streams of all gateways.
#[derive(Clone, Default)]
pub(super) struct ReportStreams(Arc<Mutex<OpenStreams>>);

/// Streams and the memory of their messages, by owner.
#[derive(Debug, Default)]
struct OpenStreams {
    /// Number of the last stream.
    last: u64,
    count: usize,
    bytes: usize,
    owners: BTreeMap<StreamOwner, OwnerStreams>,
}

/// Streams of one owner, the oldest first, without those that a newer one has replaced.
#[derive(Debug, Default)]
struct OwnerStreams {
    current: VecDeque<(u64, Arc<Notify>)>,
    bytes: usize,
}

/// Why a stream is not opened, or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StreamsExceeded {
    /// All gateways together have too many streams at a spoke. The gateway tries again.
    #[error(
        "{} streams of reports are open, the maximum; stop gateways that are not needed",
        ALL_STREAMS_MAX
    )]
    Streams,
    /// A gateway has newer streams, and this one ends. No action unless several gateways have one certificate.
    #[error(
        "{} newer streams of this gateway are open, the maximum; close one before another is opened",
        GATEWAY_STREAMS_MAX
    )]
    GatewayStreams,
    /// The messages of a gateway that does not read its reports need too much memory. Its stream ends.
    #[error("the messages of this gateway take {} bytes, the maximum; read the reports", GATEWAY_BYTES_MAX)]
    GatewayBytes,
    /// The messages of all gateways need too much memory at a spoke. The stream ends, and the gateway tries again.
    #[error("the messages of all gateways take {} bytes, the maximum; try again shortly", ALL_BYTES_MAX)]
    AllBytes,
}

/// Stream that is open until this is dropped.
pub(super) struct ReportStream {
    all: ReportStreams,
    number: u64,
    owner: StreamOwner,
    /// Signal that a newer stream of the gateway replaces it.
    replaced: Arc<Notify>,
    /// Bytes that are counted.
    bytes: usize,
}

impl ReportStreams {
    /// Opens the stream of a request.
    pub(super) fn open(&self, session: &ServerSession) -> Result<ReportStream, StreamsExceeded> {
        let tls = session.digest().and_then(|digest| digest.ssl_digest.as_ref());
        let certificate = tls.map(|tls| tls.cert_digest.clone()).filter(|digest| !digest.is_empty());
        self.open_of(certificate.map_or(StreamOwner::Unknown, StreamOwner::Certificate))
    }

    fn open_of(&self, owner: StreamOwner) -> Result<ReportStream, StreamsExceeded> {
        let replaced = Arc::<Notify>::default();
        let number = self.0.lock().open(&owner, replaced.clone())?;
        Ok(ReportStream { all: self.clone(), number, owner, replaced, bytes: 0 })
    }
}

impl ReportStream {
    /// Makes the gateway that a request names the owner, if the connection does not prove another one.
    pub(super) fn identify(&mut self, gateway: &Gateway) -> Result<(), StreamsExceeded> {
        if self.owner == StreamOwner::Unknown {
            let mut identified = self.all.open_of(StreamOwner::Reported(gateway.clone()))?;
            identified.hold(self.bytes + STREAM_BYTES_FREE)?;
            *self = identified;
        }
        Ok(())
    }

    /// Counts the bytes of its messages from now on.
    pub(super) fn hold(&mut self, bytes: usize) -> Result<(), StreamsExceeded> {
        let bytes = bytes.saturating_sub(STREAM_BYTES_FREE);
        if bytes != self.bytes {
            self.all.0.lock().hold(&self.owner, self.bytes, bytes)?;
            self.bytes = bytes;
        }
        Ok(())
    }

    /// Completes when a newer stream of the gateway has replaced it.
    pub(super) async fn replaced(&self) {
        self.replaced.notified().await;
    }
}

impl Drop for ReportStream {
    fn drop(&mut self) {
        self.all.0.lock().close(&self.owner, self.number, self.bytes);
    }
}

impl OpenStreams {
    fn open(&mut self, owner: &StreamOwner, replaced: Arc<Notify>) -> Result<u64, StreamsExceeded> {
        if self.count >= ALL_STREAMS_MAX {
            return Err(StreamsExceeded::Streams);
        }
        self.last += 1;
        self.count += 1;
        let streams = self.owners.entry(owner.clone()).or_default();
        streams.current.push_back((self.last, replaced));
        if streams.current.len() > owner.streams_max()
            && let Some((_, oldest)) = streams.current.pop_front()
        {
            oldest.notify_one();
        }
        Ok(self.last)
    }

    fn hold(&mut self, owner: &StreamOwner, before: usize, now: usize) -> Result<(), StreamsExceeded> {
        let streams = self.owners.entry(owner.clone()).or_default();
        let (of_owner, of_all) = (streams.bytes - before + now, self.bytes - before + now);
        if now > before && of_owner > GATEWAY_BYTES_MAX {
            return Err(StreamsExceeded::GatewayBytes);
        }
        if now > before && of_all > ALL_BYTES_MAX {
            return Err(StreamsExceeded::AllBytes);
        }
        (streams.bytes, self.bytes) = (of_owner, of_all);
        Ok(())
    }

    fn close(&mut self, owner: &StreamOwner, number: u64, bytes: usize) {
        self.count -= 1;
        self.bytes -= bytes;
        if let Some(streams) = self.owners.get_mut(owner) {
            streams.bytes -= bytes;
            streams.current.retain(|(other, _)| *other != number);
            // A stream that was replaced may still hold memory.
            if streams.current.is_empty() && streams.bytes == 0 {
                self.owners.remove(owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(number: u8) -> StreamOwner {
        StreamOwner::Certificate(vec![number])
    }

    fn open(streams: &ReportStreams, owner: StreamOwner) -> ReportStream {
        streams.open_of(owner).unwrap()
    }

    async fn is_replaced(stream: &ReportStream) -> bool {
        tokio::select! {
            biased;
            () = stream.replaced() => true,
            () = std::future::ready(()) => false,
        }
    }

    #[tokio::test]
    async fn the_newest_streams_of_a_gateway_replace_its_own_and_no_others() {
        let streams = ReportStreams::default();
        let other = open(&streams, certificate(2));
        let mut of_gateway: Vec<ReportStream> =
            (0..GATEWAY_STREAMS_MAX).map(|_| open(&streams, certificate(1))).collect();
        assert!(!is_replaced(&of_gateway[0]).await, "at the limit");
        of_gateway.push(open(&streams, certificate(1)));
        assert!(is_replaced(&of_gateway[0]).await);
        assert!(!is_replaced(&of_gateway[1]).await && !is_replaced(&other).await);
        of_gateway.truncate(2);
        of_gateway.remove(0);
        for _ in 0..GATEWAY_STREAMS_MAX - 1 {
            of_gateway.push(open(&streams, certificate(1)));
        }
        assert!(!is_replaced(&of_gateway[0]).await, "the end of a stream makes room");
        drop((of_gateway, other));
        let open = streams.0.lock();
        assert_eq!((open.count, open.bytes, open.owners.len()), (0, 0, 0));
    }

    #[tokio::test]
    async fn a_gateway_cannot_take_the_streams_of_all() {
        let streams = ReportStreams::default();
        let mut current: Vec<ReportStream> = Vec::new();
        for _ in 0..2 * ALL_STREAMS_MAX {
            current.push(streams.open_of(certificate(1)).unwrap());
            if is_replaced(&current[0]).await {
                current.remove(0);
            }
        }
        assert_eq!(current.len(), GATEWAY_STREAMS_MAX);
        assert!(streams.open_of(certificate(2)).is_ok());
    }

    #[test]
    fn the_streams_of_all_gateways_are_limited() {
        let streams = ReportStreams::default();
        let gateways = 0..ALL_STREAMS_MAX as u64;
        let mut all: Vec<ReportStream> = gateways
            .map(|boot_id| {
                open(&streams, StreamOwner::Reported(Gateway { location: "a".to_owned(), boot_id }))
            })
            .collect();
        assert_eq!(streams.open_of(certificate(1)).err(), Some(StreamsExceeded::Streams));
        all.pop();
        assert!(streams.open_of(certificate(1)).is_ok());
    }

    #[tokio::test]
    async fn over_plaintext_a_stream_belongs_to_the_gateway_that_it_names() {
        let streams = ReportStreams::default();
        let gateway = |boot_id| Gateway { location: "aws/us-east-1".to_owned(), boot_id };
        let mut all = Vec::new();
        for boot_id in [1, 2].iter().cycle().take(2 * GATEWAY_STREAMS_MAX) {
            let mut stream = open(&streams, StreamOwner::Unknown);
            stream.hold(STREAM_BYTES_FREE + 5).unwrap();
            stream.identify(&gateway(*boot_id)).unwrap();
            assert_eq!(stream.bytes, 5);
            all.push(stream);
        }
        let mut proven = open(&streams, certificate(1));
        proven.identify(&gateway(1)).unwrap();
        assert_eq!(proven.owner, certificate(1));
        assert!(!is_replaced(&all[0]).await);
        let mut next = open(&streams, StreamOwner::Unknown);
        next.identify(&gateway(1)).unwrap();
        assert!(is_replaced(&all[0]).await && !is_replaced(&all[1]).await);
        assert_eq!(streams.0.lock().count, 2 * GATEWAY_STREAMS_MAX + 2);
        drop((all, proven, next));
        assert_eq!(streams.0.lock().owners.len(), 0);
    }

    #[test]
    fn memory_is_limited_for_each_gateway_and_for_all() {
        let streams = ReportStreams::default();
        let mut first = open(&streams, certificate(0));
        first.hold(GATEWAY_BYTES_MAX).unwrap();
        first.hold(STREAM_BYTES_FREE).unwrap();
        assert_eq!(first.bytes, 0);
        let mut all = Vec::new();
        for number in 0..(ALL_BYTES_MAX / GATEWAY_BYTES_MAX) as u8 {
            let mut stream = open(&streams, certificate(number));
            stream.hold(STREAM_BYTES_FREE + GATEWAY_BYTES_MAX).unwrap();
            assert_eq!(
                stream.hold(STREAM_BYTES_FREE + GATEWAY_BYTES_MAX + 1),
                Err(StreamsExceeded::GatewayBytes)
            );
            all.push(stream);
        }
        assert_eq!(first.hold(STREAM_BYTES_FREE + 1), Err(StreamsExceeded::GatewayBytes), "beside the other");
        let mut other = open(&streams, certificate(99));
        other.hold(STREAM_BYTES_FREE).unwrap();
        assert_eq!(other.hold(STREAM_BYTES_FREE + 1), Err(StreamsExceeded::AllBytes));
        all.pop();
        other.hold(STREAM_BYTES_FREE + 1).unwrap();
    }
}
