//! Causes of failed connections between gateway and region: a closed set of labels for logs and metrics.

use gateway_core::spiffe::WrongPeer;
use rustls::{AlertDescription, CertificateError, Error, OtherError};
use std::io;

/// Cause of a failed connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The certificate is from a trusted authority but names another peer.
    WrongPeer,
    /// The certificate is not signed by a trusted authority, or not valid for this use.
    Untrusted,
    /// The certificate has expired, or is not valid yet.
    NotValidNow,
    /// The peer does not send TLS.
    NotTls,
    /// The peer sends TLS on a plaintext port.
    UnexpectedTls,
    /// The connection would leave this machine in plaintext, which the configuration does not allow.
    InTheClear,
    /// The peer rejected our certificate or handshake.
    Refused,
    /// The handshake timed out.
    TimedOut,
    /// Any other cause, such as a missing certificate or no common TLS version; the log contains the library's message.
    Other,
}

impl Cause {
    /// Every cause.
    pub(crate) const ALL: [Cause; 9] = [
        Cause::WrongPeer,
        Cause::Untrusted,
        Cause::NotValidNow,
        Cause::NotTls,
        Cause::UnexpectedTls,
        Cause::InTheClear,
        Cause::Refused,
        Cause::TimedOut,
        Cause::Other,
    ];

    /// Returns the label.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Cause::WrongPeer => "wrong_peer",
            Cause::Untrusted => "untrusted",
            Cause::NotValidNow => "not_valid_now",
            Cause::NotTls => "not_tls",
            Cause::UnexpectedTls => "unexpected_tls",
            Cause::InTheClear => "in_the_clear",
            Cause::Refused => "refused",
            Cause::TimedOut => "timed_out",
            Cause::Other => "other",
        }
    }

    pub(super) fn of(error: &Error) -> Cause {
        match error {
            Error::InvalidCertificate(CertificateError::Other(OtherError(why))) if why.is::<WrongPeer>() => {
                Cause::WrongPeer
            }
            Error::InvalidCertificate(
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. },
            ) => Cause::NotValidNow,
            Error::InvalidCertificate(_) => Cause::Untrusted,
            Error::InvalidMessage(_) => Cause::NotTls,
            // Alerts of a TLS server that do not reject this client.
            Error::AlertReceived(AlertDescription::CloseNotify | AlertDescription::InternalError) => {
                Cause::Other
            }
            Error::AlertReceived(_) => Cause::Refused,
            _ => Cause::Other,
        }
    }

    /// Returns the cause of an I/O error, if TLS is the reason.
    pub(crate) fn of_io(error: &io::Error) -> Option<Cause> {
        error.get_ref()?.downcast_ref::<Error>().map(Cause::of)
    }
}

/// Wraps a name mismatch in the error type of rustls verifiers.
pub(super) fn wrong_peer(wrong: WrongPeer) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(std::sync::Arc::new(wrong))))
}
