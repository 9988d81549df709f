//! Test of the memory that a connection needs between its requests.

use super::*;
use crate::metrics::ListenerMetrics;
use pingora::protocols::l4::stream::Stream as Connection;

/// Maximum size of the task of a connection.
const TASK_BYTES_MAX: usize = 2 << 10;

/// Handler whose requests need more memory than that.
struct LargeHandler;

impl RequestHandler for LargeHandler {
    async fn handle(&self, _: &mut ServerSession) -> AfterResponse {
        let state = [0_u8; 8 * TASK_BYTES_MAX];
        tokio::task::yield_now().await;
        if std::hint::black_box(&state).is_empty() { AfterResponse::Close } else { AfterResponse::Reuse }
    }
}

#[tokio::test]
async fn the_task_of_a_connection_has_no_memory_for_a_request() {
    let (_stage, stage) = watch::channel(DrainStage::Serving);
    let counts: Arc<ListenerMetrics> = Arc::default();
    let open = Arc::new(OpenConnections::new(AddressLimits::NONE, counts.clone()));
    let shared = Arc::new(Shared {
        handler: Arc::new(LargeHandler),
        timeouts: Timeouts::default(),
        security: Arc::new(TransportSecurity::Plaintext),
        refused: Arc::default(),
        load_balancers: Arc::default(),
        peer: PeerKind::Client,
        stage,
        evict_idle: Notify::new(),
        open: open.clone(),
        counts,
    });
    let socket = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let client = tokio::net::TcpStream::connect(socket.local_addr().expect("an address"));
    let stream: Connection = client.await.expect("connected").into();
    let admitted = open.admit(IpAddr::V4(Ipv4Addr::LOCALHOST)).expect("no limits");
    let task = shared.serve(stream, admitted);
    assert!(size_of_val(&task) <= TASK_BYTES_MAX, "{} bytes", size_of_val(&task));
}
