//! TLS for clients. The certificate is reloaded when its files change ([`identity::certificate`]).

use identity::certificate::TlsIdentity;
use pingora::listeners::tls::Acceptor;
use rustls::crypto::ring;
use rustls::server::ServerConfig;
use std::sync::Arc;

/// ALPN protocols, in order of preference.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// Returns the acceptor for clients: TLS 1.2 and 1.3, HTTP/2 or HTTP/1.1. It issues tickets, since a resumed handshake
/// costs a tenth of a full one.
pub(crate) fn acceptor(identity: Arc<TlsIdentity>) -> Result<Acceptor, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(identity);
    config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).into();
    config.ticketer = ring::Ticketer::new()?;
    Ok(Acceptor::from_server_config(Arc::new(config)))
}
