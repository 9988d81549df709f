//! Causes of failed connections between processes: a closed set of labels for logs and metrics.

use metrics::labels;
use regions::spiffe::WrongPeer;
use rustls::{AlertDescription, CertificateError, Error, OtherError};
use std::io;

labels! {
    /// Cause of a failed connection.
    pub enum ConnectionFailureCause {
        /// The certificate is from a trusted authority but names another peer.
        WrongPeer = "wrong_peer",
        /// The certificate is not signed by a trusted authority, or not valid for this use.
        Untrusted = "untrusted",
        /// The certificate has expired, or is not valid yet.
        OutsideValidity = "outside_validity",
        /// The certificate is revoked.
        Revoked = "revoked",
        /// The peer does not send TLS.
        NotTls = "not_tls",
        /// The peer sends TLS on a plaintext port.
        UnexpectedTls = "unexpected_tls",
        /// The connection would leave this machine in plaintext, which the configuration does not allow.
        PlaintextForbidden = "plaintext_forbidden",
        /// The peer rejected our certificate or handshake.
        RejectedByPeer = "rejected_by_peer",
        /// The limit of connections or handshakes is reached.
        Overloaded = "overloaded",
        /// The handshake timed out, or no request followed it in time. At an operations port: the request and the response took too
        /// long.
        TimedOut = "timed_out",
        /// The connection of a load balancer does not begin with a valid PROXY protocol header.
        ProxyHeader = "proxy_header",
        /// The peer is not one of the load balancers from which connections are accepted.
        ProxyUntrusted = "proxy_untrusted",
        /// Any other cause, such as a missing certificate or no common TLS version; the log contains the library's message.
        Other = "other",
    }
}

impl ConnectionFailureCause {
    /// Returns the cause of an error of TLS.
    pub fn of(error: &Error) -> ConnectionFailureCause {
        match error {
            Error::InvalidCertificate(CertificateError::Other(OtherError(reason)))
                if reason.is::<WrongPeer>() =>
            {
                ConnectionFailureCause::WrongPeer
            }
            Error::InvalidCertificate(
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. },
            ) => ConnectionFailureCause::OutsideValidity,
            Error::InvalidCertificate(CertificateError::Revoked) => ConnectionFailureCause::Revoked,
            Error::InvalidCertificate(_) => ConnectionFailureCause::Untrusted,
            Error::InvalidMessage(_) => ConnectionFailureCause::NotTls,
            // Alerts of a TLS server that do not reject this client.
            Error::AlertReceived(AlertDescription::CloseNotify | AlertDescription::InternalError) => {
                ConnectionFailureCause::Other
            }
            Error::AlertReceived(_) => ConnectionFailureCause::RejectedByPeer,
            _ => ConnectionFailureCause::Other,
        }
    }

    /// Returns the cause of an I/O error, if TLS is the reason.
    pub fn of_io(error: &io::Error) -> Option<ConnectionFailureCause> {
        tls_error(error).map(ConnectionFailureCause::of)
    }
}

/// Returns the error of TLS that is the reason of an I/O error.
pub(crate) fn tls_error(error: &io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref()
}

/// Returns the text of an error of TLS. The library shows a name mismatch as a Rust value, so its own text is taken.
pub fn reason(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(CertificateError::Other(OtherError(reason)))
            if reason.is::<WrongPeer>() =>
        {
            reason.to_string()
        }
        _ => error.to_string(),
    }
}

/// Wraps a name mismatch in the error type of rustls verifiers.
pub(crate) fn wrong_peer(wrong: WrongPeer) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(std::sync::Arc::new(wrong))))
}
