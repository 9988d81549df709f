//! Open streams of reports: how many a gateway has, and the memory of their messages.
//!
//! A gateway is what its first request names, and the certificate of its connection: the gateways of a region may have one
//! certificate in common, as with cert-manager. What a stream says about its gateway is not proven, so the streams of a
//! certificate have a second, larger limit: a process that names ever new gateways takes no streams of another certificate.
//! The newest streams are kept: of those on a path that has failed, the spoke learns only after a while that they have
//! ended, and the gateway has replaced them. A gateway without a stream would be blind, so a limit never rejects one that
//! has fewer streams than it may have, unless the limit of all gateways together is reached.
//!
//! Memory is counted beyond a few kilobytes of each stream, which idle messages need: what has arrived of a request, the
//! overflow that the next one may refer to, and the report until it is written. A large report waits for its memory before
//! it is made. A stream whose other messages find no memory ends.

use crate::metrics::ReportStreamLimit;
use pingora::protocols::http::ServerSession;
use scheduler_api::report::stream::{REPORT_BYTES_MAX, REQUEST_BYTES_MAX, STREAMS_MAX};
use scheduler_api::report::{GATEWAYS_MAX, Gateway};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use supervision::Mutex;
use tokio::sync::{Notify, watch};

/// Maximum number of streams of one gateway: those of its process and of the one that it hands over to, and two that have been
/// replaced and whose end is unknown.
const GATEWAY_STREAMS_MAX: usize = 2 * STREAMS_MAX + 2;
/// Maximum number of streams of one certificate: three of each of 256 gateways of a region.
const CERTIFICATE_STREAMS_MAX: usize = ALL_STREAMS_MAX / 4;
/// Maximum number of streams of all gateways.
pub(super) const ALL_STREAMS_MAX: usize = STREAMS_MAX * GATEWAYS_MAX;
/// Bytes of each stream that are not counted: an idle message has some 20, and one with the overflow of twenty deployments or the
/// loads of ten less than 2 KiB.
const STREAM_BYTES_FREE: usize = 4 << 10;
/// Maximum memory of a stream before its first request has named the gateway: that request, and what arrives with it.
const UNIDENTIFIED_MEMORY_MAX: usize = 2 * REQUEST_BYTES_MAX;
/// Maximum memory of the messages of one gateway: three times the largest ones on each stream of a process.
const GATEWAY_MEMORY_MAX: usize = 64 << 20;
/// Maximum memory of the messages of one certificate, so that one leaves as much to the others.
const CERTIFICATE_MEMORY_MAX: usize = ALL_MEMORY_MAX / 2;
/// Maximum memory of the messages of all gateways: complete reports of a thousand deployments (0.3 MB) to 900 gateways at once,
/// or of ten thousand to 90. Other gateways wait meanwhile.
const ALL_MEMORY_MAX: usize = 256 << 20;
const _: () = assert!(
    GATEWAY_MEMORY_MAX > STREAMS_MAX * (3 * REQUEST_BYTES_MAX + REPORT_BYTES_MAX),
    "the largest messages of a gateway have memory"
);

/// Owner of streams. Streams of a gateway with a certificate have two.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum StreamOwner {
    /// The process, or the processes of a region, with the certificate of this digest.
    Certificate(Vec<u8>),
    /// The gateway that a first request names, and its certificate unless the connection is plaintext.
    Gateway(Option<Vec<u8>>, Gateway),
}

impl StreamOwner {
    /// Returns the maximum number of its streams.
    fn streams_max(&self) -> usize {
        match self {
            StreamOwner::Certificate(_) => CERTIFICATE_STREAMS_MAX,
            StreamOwner::Gateway(..) => GATEWAY_STREAMS_MAX,
        }
    }

    fn too_many_streams(&self) -> StreamsExceeded {
        match self {
            StreamOwner::Certificate(_) => StreamsExceeded::CertificateStreams,
            StreamOwner::Gateway(..) => StreamsExceeded::GatewayStreams,
        }
    }

    /// Returns the maximum memory of its messages.
    fn memory_max(&self) -> usize {
        match self {
            StreamOwner::Certificate(_) => CERTIFICATE_MEMORY_MAX,
            StreamOwner::Gateway(..) => GATEWAY_MEMORY_MAX,
        }
    }

    fn too_much_memory(&self) -> StreamsExceeded {
        match self {
            StreamOwner::Certificate(_) => StreamsExceeded::CertificateMemory,
            StreamOwner::Gateway(..) => StreamsExceeded::GatewayMemory,
        }
    }
}

/// Open streams of all gateways.
#[derive(Clone, Default)]
pub(super) struct ReportStreams(Arc<Mutex<OpenStreams>>);

/// Streams and the memory of their messages.
#[derive(Debug, Default)]
struct OpenStreams {
    /// Number of the last stream.
    last: u64,
    streams: BTreeMap<u64, RegisteredStream>,
    owners: BTreeMap<StreamOwner, OwnerStreams>,
    bytes: usize,
    /// Signal that memory of all gateways was released.
    released: Arc<Notify>,
}

/// One stream.
#[derive(Debug)]
struct RegisteredStream {
    owners: Vec<StreamOwner>,
    /// Limit because of which a newer stream has replaced it.
    replaced: watch::Sender<Option<StreamsExceeded>>,
    /// Bytes that are counted.
    bytes: usize,
}

/// Streams of one owner.
#[derive(Debug, Default)]
struct OwnerStreams {
    /// Number of its streams, also of replaced ones that have not ended yet.
    count: usize,
    /// Those that no newer one has replaced.
    current: BTreeSet<u64>,
    bytes: usize,
    /// Signal that memory of the owner was released.
    released: Arc<Notify>,
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
    /// A gateway has newer streams, and this one ends. No action unless several gateways have one location and boot id.
    #[error(
        "{} newer streams of this gateway are open, the maximum; close one before another is opened",
        GATEWAY_STREAMS_MAX
    )]
    GatewayStreams,
    /// The gateways with one certificate have newer streams, and this one ends. Give them several certificates.
    #[error(
        "{} newer streams of gateways with this certificate are open, the maximum; give them several certificates",
        CERTIFICATE_STREAMS_MAX
    )]
    CertificateStreams,
    /// The messages of a gateway that does not read its reports need too much memory. Its stream ends.
    #[error("the messages of this gateway take {} bytes, the maximum; read the reports", GATEWAY_MEMORY_MAX)]
    GatewayMemory,
    /// The messages of the gateways with one certificate need too much memory. The stream ends, and the gateway tries again.
    #[error(
        "the messages of gateways with this certificate take {} bytes, the maximum; try again shortly",
        CERTIFICATE_MEMORY_MAX
    )]
    CertificateMemory,
    /// The messages of all gateways need too much memory at a spoke. The stream ends, and the gateway tries again.
    #[error("the messages of all gateways take {} bytes, the maximum; try again shortly", ALL_MEMORY_MAX)]
    Memory,
}

impl StreamsExceeded {
    /// Returns the label of its metric.
    pub(super) fn limit(self) -> ReportStreamLimit {
        match self {
            StreamsExceeded::Streams => ReportStreamLimit::Streams,
            StreamsExceeded::GatewayStreams => ReportStreamLimit::GatewayStreams,
            StreamsExceeded::CertificateStreams => ReportStreamLimit::CertificateStreams,
            StreamsExceeded::GatewayMemory => ReportStreamLimit::GatewayMemory,
            StreamsExceeded::CertificateMemory => ReportStreamLimit::CertificateMemory,
            StreamsExceeded::Memory => ReportStreamLimit::Memory,
        }
    }
}

/// Stream that is open until this is dropped.
pub(super) struct ReportStream {
    all: ReportStreams,
    number: u64,
    certificate: Option<Vec<u8>>,
    replaced: watch::Receiver<Option<StreamsExceeded>>,
    /// Bytes that are counted.
    bytes: usize,
}

impl ReportStreams {
    /// Opens the stream of a request.
    pub(super) fn open(&self, session: &ServerSession) -> Result<ReportStream, StreamsExceeded> {
        let tls = session.digest().and_then(|digest| digest.ssl_digest.as_ref());
        let certificate = tls.map(|tls| tls.cert_digest.clone()).filter(|digest| !digest.is_empty());
        self.open_of(certificate)
    }

    fn open_of(&self, certificate: Option<Vec<u8>>) -> Result<ReportStream, StreamsExceeded> {
        let (sender, replaced) = watch::channel(None);
        let number = self.0.lock().open(sender)?;
        let stream = ReportStream { all: self.clone(), number, certificate, replaced, bytes: 0 };
        if let Some(certificate) = &stream.certificate {
            self.0.lock().add_owner(number, StreamOwner::Certificate(certificate.clone()))?;
        }
        Ok(stream)
    }
}

impl ReportStream {
    /// Makes the gateway that the first request names the owner.
    pub(super) fn identify(&mut self, gateway: &Gateway) -> Result<(), StreamsExceeded> {
        let owner = StreamOwner::Gateway(self.certificate.clone(), gateway.clone());
        self.all.0.lock().add_owner(self.number, owner)
    }

    /// Counts the bytes of its messages from now on.
    pub(super) fn hold(&mut self, bytes: usize) -> Result<(), StreamsExceeded> {
        let bytes = bytes.saturating_sub(STREAM_BYTES_FREE);
        if bytes != self.bytes {
            self.all.0.lock().hold(self.number, bytes)?;
            self.bytes = bytes;
        }
        Ok(())
    }

    /// Counts the bytes of its messages from now on, and waits for memory that others hold. Waiting streams are served in the
    /// order in which they began to wait, except that one which finds too little waits again behind the others.
    ///
    /// # Errors
    ///
    /// When the gateway itself holds the memory.
    pub(super) async fn hold_when_available(&mut self, bytes: usize) -> Result<(), StreamsExceeded> {
        let mut signal: Option<Arc<Notify>> = None;
        loop {
            let held = self.hold(bytes);
            let next = held.err().and_then(|exceeded| self.all.0.lock().released(self.number, exceeded));
            // What is left may suffice for the next one, unless this stream still waits for it.
            let is_same = |signal: &Arc<Notify>| next.as_ref().is_some_and(|next| Arc::ptr_eq(next, signal));
            if let Some(signal) = signal.filter(|signal| !is_same(signal)) {
                signal.notify_one();
            }
            let Some(next) = next else { return held };
            next.notified().await;
            signal = Some(next);
        }
    }

    /// Completes with the limit when a newer stream has replaced it, and from then on at once.
    pub(super) fn replaced(&self) -> impl Future<Output = StreamsExceeded> + Send + use<> {
        let mut replaced = self.replaced.clone();
        async move {
            let limit = replaced.wait_for(Option::is_some).await.ok().and_then(|limit| *limit);
            match limit {
                Some(limit) => limit,
                // The stream has ended.
                None => std::future::pending().await,
            }
        }
    }
}

impl Drop for ReportStream {
    fn drop(&mut self) {
        self.all.0.lock().close(self.number);
    }
}

impl OpenStreams {
    /// Adds a stream without an owner, and returns its number.
    fn open(&mut self, replaced: watch::Sender<Option<StreamsExceeded>>) -> Result<u64, StreamsExceeded> {
        if self.streams.len() >= ALL_STREAMS_MAX {
            return Err(StreamsExceeded::Streams);
        }
        self.last += 1;
        self.streams.insert(self.last, RegisteredStream { owners: Vec::new(), replaced, bytes: 0 });
        Ok(self.last)
    }

    /// Adds an owner of a stream, whose oldest stream is replaced if it has too many.
    fn add_owner(&mut self, number: u64, owner: StreamOwner) -> Result<(), StreamsExceeded> {
        let Some(stream) = self.streams.get_mut(&number) else { return Ok(()) };
        let is_replaced = stream.replaced.borrow().is_some();
        let bytes = self.owners.get(&owner).map_or(0, |streams| streams.bytes) + stream.bytes;
        if bytes > owner.memory_max() {
            return Err(owner.too_much_memory());
        }
        stream.owners.push(owner.clone());
        let streams = self.owners.entry(owner.clone()).or_default();
        streams.count += 1;
        streams.bytes = bytes;
        if !is_replaced {
            streams.current.insert(number);
        }
        if streams.current.len() > owner.streams_max()
            && let Some(oldest) = streams.current.first().copied()
        {
            self.replace(oldest, owner.too_many_streams());
        }
        Ok(())
    }

    fn replace(&mut self, number: u64, limit: StreamsExceeded) {
        let Some(stream) = self.streams.get(&number) else { return };
        stream.replaced.send_replace(Some(limit));
        for owner in &stream.owners {
            if let Some(streams) = self.owners.get_mut(owner) {
                streams.current.remove(&number);
            }
        }
    }

    fn hold(&mut self, number: u64, now: usize) -> Result<(), StreamsExceeded> {
        let Some(stream) = self.streams.get_mut(&number) else { return Ok(()) };
        let before = std::mem::replace(&mut stream.bytes, now);
        let exceeded = if now > before { self.exceeded_by(number, now - before) } else { None };
        let Some(stream) = self.streams.get_mut(&number) else { return Ok(()) };
        if let Some(exceeded) = exceeded {
            stream.bytes = before;
            return Err(exceeded);
        }
        for owner in &stream.owners {
            if let Some(streams) = self.owners.get_mut(owner) {
                streams.bytes = streams.bytes - before + now;
                if now < before {
                    streams.released.notify_one();
                }
            }
        }
        self.bytes = self.bytes - before + now;
        if now < before {
            self.released.notify_one();
        }
        Ok(())
    }

    /// Returns the limit that a stream exceeds with `added` more bytes, which its own already include.
    fn exceeded_by(&self, number: u64, added: usize) -> Option<StreamsExceeded> {
        let stream = self.streams.get(&number)?;
        let is_identified = stream.owners.iter().any(|owner| matches!(owner, StreamOwner::Gateway(..)));
        if !is_identified && stream.bytes > UNIDENTIFIED_MEMORY_MAX {
            return Some(StreamsExceeded::GatewayMemory);
        }
        let is_exceeded = |owner: &&StreamOwner| {
            self.owners.get(owner).is_some_and(|streams| streams.bytes + added > owner.memory_max())
        };
        // The gateway's own limit first: waiting for others does not help there.
        let owner = stream.owners.iter().rev().find(is_exceeded).map(StreamOwner::too_much_memory);
        owner.or((self.bytes + added > ALL_MEMORY_MAX).then_some(StreamsExceeded::Memory))
    }

    /// Returns the signal that memory below a limit was released; `None` if no other gateway can release it.
    fn released(&self, number: u64, exceeded: StreamsExceeded) -> Option<Arc<Notify>> {
        match exceeded {
            StreamsExceeded::Memory => Some(self.released.clone()),
            StreamsExceeded::CertificateMemory => {
                let mut owners = self.streams.get(&number)?.owners.iter();
                let certificate = owners.find(|owner| matches!(owner, StreamOwner::Certificate(_)))?;
                Some(self.owners.get(certificate)?.released.clone())
            }
            StreamsExceeded::Streams
            | StreamsExceeded::GatewayStreams
            | StreamsExceeded::CertificateStreams
            | StreamsExceeded::GatewayMemory => None,
        }
    }

    fn close(&mut self, number: u64) {
        // Releases its memory. Less memory exceeds no limit.
        self.hold(number, 0).ok();
        let Some(stream) = self.streams.remove(&number) else { return };
        for owner in &stream.owners {
            if let Some(streams) = self.owners.get_mut(owner) {
                streams.current.remove(&number);
                streams.count -= 1;
                if streams.count == 0 {
                    self.owners.remove(owner);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::collections::VecDeque;

    fn gateway(boot_id: u64) -> Gateway {
        Gateway { location: "aws/us-east-1".to_owned(), boot_id }
    }

    /// Opens a stream of a gateway with a certificate.
    fn open(streams: &ReportStreams, certificate: u8, boot_id: u64) -> ReportStream {
        identified(streams, Some(certificate), boot_id)
    }

    fn identified(streams: &ReportStreams, certificate: Option<u8>, boot_id: u64) -> ReportStream {
        let mut stream = streams.open_of(certificate.map(|number| vec![number])).unwrap();
        stream.identify(&gateway(boot_id)).unwrap();
        stream
    }

    fn replaced(stream: &ReportStream) -> Option<StreamsExceeded> {
        stream.replaced().now_or_never()
    }

    #[test]
    fn the_newest_streams_of_a_gateway_replace_its_own_and_no_others() {
        let streams = ReportStreams::default();
        let others = [open(&streams, 2, 1), open(&streams, 1, 2), identified(&streams, None, 1)];
        let mut of_gateway: Vec<ReportStream> =
            (0..GATEWAY_STREAMS_MAX).map(|_| open(&streams, 1, 1)).collect();
        assert_eq!(replaced(&of_gateway[0]), None, "at the limit");
        of_gateway.push(open(&streams, 1, 1));
        for _ in 0..2 {
            assert_eq!(replaced(&of_gateway[0]), Some(StreamsExceeded::GatewayStreams), "it stays replaced");
        }
        assert_eq!(replaced(&of_gateway[1]), None);
        assert!(others.iter().all(|other| replaced(other).is_none()));
        of_gateway.truncate(2);
        of_gateway.remove(0);
        for _ in 0..GATEWAY_STREAMS_MAX - 1 {
            of_gateway.push(open(&streams, 1, 1));
        }
        assert_eq!(replaced(&of_gateway[0]), None, "the end of a stream makes room");
        drop((of_gateway, others));
        let open = streams.0.lock();
        assert_eq!((open.streams.len(), open.bytes, open.owners.len()), (0, 0, 0));
    }

    /// cert-manager gives all gateways of a region one certificate.
    #[test]
    fn gateways_with_one_certificate_replace_no_streams_of_each_other() {
        let streams = ReportStreams::default();
        let gateways = 0..GATEWAY_STREAMS_MAX as u64 + 1;
        let of_each = |boot_id| (0..STREAMS_MAX).map(|_| open(&streams, 1, boot_id)).collect::<Vec<_>>();
        let all: Vec<ReportStream> = gateways.flat_map(of_each).collect();
        assert!(all.iter().all(|stream| replaced(stream).is_none()));
    }

    #[test]
    fn a_certificate_cannot_take_the_streams_of_all_whatever_gateways_it_names() {
        let streams = ReportStreams::default();
        let other = open(&streams, 2, 1);
        let mut of_certificate: VecDeque<ReportStream> =
            (0..CERTIFICATE_STREAMS_MAX as u64).map(|boot_id| open(&streams, 1, boot_id)).collect();
        assert_eq!(replaced(&of_certificate[0]), None, "at the limit");
        // Also before it names a gateway.
        of_certificate.push_back(streams.open_of(Some(vec![1])).unwrap());
        for boot_id in 0..ALL_STREAMS_MAX as u64 {
            let oldest = of_certificate.pop_front();
            assert_eq!(oldest.as_ref().and_then(replaced), Some(StreamsExceeded::CertificateStreams));
            assert_eq!(replaced(&of_certificate[0]), None);
            of_certificate.push_back(open(&streams, 1, boot_id));
        }
        assert_eq!(replaced(&other), None);
    }

    #[test]
    fn the_streams_of_all_gateways_are_limited_and_the_last_one_can_be_used() {
        let streams = ReportStreams::default();
        let mut all: Vec<ReportStream> =
            (0..ALL_STREAMS_MAX as u64).map(|boot_id| identified(&streams, None, boot_id)).collect();
        assert_eq!(streams.open_of(Some(vec![1])).err(), Some(StreamsExceeded::Streams));
        all.pop();
        assert!(streams.open_of(Some(vec![1])).is_ok());
    }

    #[test]
    fn an_identified_stream_keeps_its_memory() {
        let streams = ReportStreams::default();
        let mut stream = streams.open_of(None).unwrap();
        stream.hold(STREAM_BYTES_FREE + 5).unwrap();
        stream.identify(&gateway(1)).unwrap();
        let owner = StreamOwner::Gateway(None, gateway(1));
        assert_eq!(streams.0.lock().owners[&owner].bytes, 5);
        let mut other = identified(&streams, None, 1);
        other.hold(STREAM_BYTES_FREE + GATEWAY_MEMORY_MAX - 5).unwrap();
        let mut one_more = streams.open_of(None).unwrap();
        one_more.hold(STREAM_BYTES_FREE + 1).unwrap();
        assert_eq!(one_more.identify(&gateway(1)), Err(StreamsExceeded::GatewayMemory));
        drop((stream, other, one_more));
        let open = streams.0.lock();
        assert_eq!((open.streams.len(), open.bytes, open.owners.len()), (0, 0, 0));
    }

    #[test]
    fn streams_without_a_first_request_have_memory_of_their_own() {
        let streams = ReportStreams::default();
        // More than one gateway may have.
        let mut all = Vec::new();
        for _ in 0..GATEWAY_MEMORY_MAX / UNIDENTIFIED_MEMORY_MAX + 1 {
            let mut stream = streams.open_of(None).unwrap();
            stream.hold(STREAM_BYTES_FREE + UNIDENTIFIED_MEMORY_MAX).unwrap();
            let one_more = stream.hold(STREAM_BYTES_FREE + UNIDENTIFIED_MEMORY_MAX + 1);
            assert_eq!(one_more, Err(StreamsExceeded::GatewayMemory));
            all.push(stream);
        }
    }

    #[test]
    fn memory_is_limited_for_each_gateway_and_certificate_and_for_all() {
        let streams = ReportStreams::default();
        let full = STREAM_BYTES_FREE + GATEWAY_MEMORY_MAX;
        let mut first = open(&streams, 0, 0);
        first.hold(STREAM_BYTES_FREE).unwrap();
        assert_eq!(first.bytes, 0);
        let mut all = Vec::new();
        for number in 0..(ALL_MEMORY_MAX / GATEWAY_MEMORY_MAX) as u64 {
            // Two gateways have one certificate.
            let mut stream = open(&streams, number as u8 / 2, number);
            stream.hold(full).unwrap();
            assert_eq!(stream.hold(full + 1), Err(StreamsExceeded::GatewayMemory));
            all.push(stream);
        }
        assert_eq!(
            first.hold(STREAM_BYTES_FREE + 1),
            Err(StreamsExceeded::GatewayMemory),
            "beside the other"
        );
        let mut same_certificate = open(&streams, 0, 98);
        assert_eq!(same_certificate.hold(STREAM_BYTES_FREE + 1), Err(StreamsExceeded::CertificateMemory));
        let mut other = open(&streams, 99, 99);
        other.hold(STREAM_BYTES_FREE).unwrap();
        assert_eq!(other.hold(STREAM_BYTES_FREE + 1), Err(StreamsExceeded::Memory));
        all.pop();
        other.hold(STREAM_BYTES_FREE + 1).unwrap();
    }

    #[test]
    fn a_stream_waits_for_memory_of_others_and_not_of_its_own_gateway() {
        let streams = ReportStreams::default();
        let full = STREAM_BYTES_FREE + GATEWAY_MEMORY_MAX;
        let mut holders: Vec<ReportStream> =
            (0..4).map(|number| open(&streams, number as u8 / 2, number)).collect();
        holders.iter_mut().for_each(|stream| stream.hold(full).unwrap());
        let [mut first, mut second] = [8, 9].map(|boot_id| open(&streams, 8, boot_id));
        let mut of_certificate = open(&streams, 0, 7);
        let mut own = open(&streams, 0, 0);
        let own = own.hold_when_available(STREAM_BYTES_FREE + 1).now_or_never();
        assert_eq!(own, Some(Err(StreamsExceeded::GatewayMemory)));
        let half = STREAM_BYTES_FREE + GATEWAY_MEMORY_MAX / 2;
        let mut waiting_certificate = Box::pin(of_certificate.hold_when_available(half));
        assert_eq!((&mut waiting_certificate).now_or_never(), None);
        let mut waiting = [&mut first, &mut second].map(|stream| Box::pin(stream.hold_when_available(half)));
        assert!(waiting.iter_mut().all(|waiting| waiting.now_or_never().is_none()));
        // One release suffices for both.
        holders.pop();
        assert!(waiting.iter_mut().all(|waiting| waiting.now_or_never() == Some(Ok(()))));
        assert_eq!((&mut waiting_certificate).now_or_never(), None, "its certificate has no memory");
        holders.remove(0);
        assert_eq!(waiting_certificate.now_or_never(), Some(Ok(())));
    }
}
