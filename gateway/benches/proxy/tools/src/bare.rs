//! Bare Pingora: a proxy that only forwards, as in its quick start.
//!
//! `bare-pingora LISTEN UPSTREAM`. One thread, the allocator of the C library, keep-alive connections to the upstream.

use async_trait::async_trait;
use pingora::prelude::*;
use std::net::SocketAddr;

/// Forwards every request to one upstream.
struct PassThrough(SocketAddr);

#[async_trait]
impl ProxyHttp for PassThrough {
    type CTX = ();

    fn new_ctx(&self) {}

    async fn upstream_peer(&self, _session: &mut Session, _: &mut ()) -> Result<Box<HttpPeer>> {
        Ok(Box::new(HttpPeer::new(self.0, false, String::new())))
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (Some(listen), Some(Ok(upstream))) =
        (arguments.next(), arguments.next().map(|address| address.parse()))
    else {
        eprintln!("usage: bare-pingora LISTEN UPSTREAM (two addresses)");
        std::process::exit(2);
    };
    let mut server = Server::new(None).expect("a server without a configuration");
    server.bootstrap();
    let mut proxy = http_proxy_service(&server.configuration, PassThrough(upstream));
    proxy.add_tcp(&listen);
    server.add_service(proxy);
    server.run_forever();
}
