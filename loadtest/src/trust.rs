//! Trusted root certificates of a run: the system's, or those of a file.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::BuilderVerifierExt;

/// TLS configuration of a run.
#[derive(Clone)]
pub struct TlsRoots(pub(crate) Arc<ClientConfig>);

impl fmt::Debug for TlsRoots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Trust")
    }
}

/// Loads the root certificates from `file`, or the system's without one.
///
/// With `http2` only HTTP/2 is offered: a server without it fails the handshake instead of falling back to HTTP/1.1.
pub(crate) fn load_roots(file: Option<&Path>, http2: bool) -> Result<TlsRoots, String> {
    let fail = |what: String| match file {
        Some(file) => format!("--cacert {}: {what}", file.display()),
        None => format!("the system certificates: {what}; pass --cacert"),
    };
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| fail(error.to_string()))?;
    let builder = match file {
        None => builder.with_platform_verifier().map_err(|error| fail(error.to_string()))?,
        Some(path) => {
            let mut roots = RootCertStore::empty();
            let read = CertificateDer::pem_file_iter(path)
                .map_err(|error| fail(format!("cannot be read: {error}")))?;
            for certificate in read {
                let certificate = certificate.map_err(|error| fail(format!("is not PEM: {error}")))?;
                roots
                    .add(certificate)
                    .map_err(|error| fail(format!("contains a certificate that is not a CA: {error}")))?;
            }
            if roots.is_empty() {
                return Err(fail("contains no certificate; pass a PEM file".to_owned()));
            }
            builder.with_root_certificates(roots)
        }
    };
    let mut config = builder.with_no_client_auth();
    config.alpn_protocols = vec![if http2 { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
    Ok(TlsRoots(Arc::new(config)))
}
