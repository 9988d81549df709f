//! Causes of failed connections between gateway and region: a closed set of labels for logs and metrics.

use gateway_core::spiffe::WrongPeer;
use rustls::{AlertDescription, CertificateError, Error, OtherError};
use std::io;

/// Cause of a failed connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HopFailureCause {
    /// The certificate is from a trusted authority but names another peer.
    WrongPeer,
    /// The certificate is not signed by a trusted authority, or not valid for this use.
    Untrusted,
    /// The certificate has expired, or is not valid yet.
    OutsideValidity,
    /// The peer does not send TLS.
    NotTls,
    /// The peer sends TLS on a plaintext port.
    UnexpectedTls,
    /// The connection would leave this machine in plaintext, which the configuration does not allow.
    PlaintextForbidden,
    /// The peer rejected our certificate or handshake.
    RejectedByPeer,
    /// The handshake timed out.
    TimedOut,
    /// Any other cause, such as a missing certificate or no common TLS version; the log contains the library's message.
    Other,
}

impl HopFailureCause {
    /// Every cause.
    pub(crate) const ALL: [HopFailureCause; 9] = [
        HopFailureCause::WrongPeer,
        HopFailureCause::Untrusted,
        HopFailureCause::OutsideValidity,
        HopFailureCause::NotTls,
        HopFailureCause::UnexpectedTls,
        HopFailureCause::PlaintextForbidden,
        HopFailureCause::RejectedByPeer,
        HopFailureCause::TimedOut,
        HopFailureCause::Other,
    ];

    /// Returns the label.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            HopFailureCause::WrongPeer => "wrong_peer",
            HopFailureCause::Untrusted => "untrusted",
            HopFailureCause::OutsideValidity => "outside_validity",
            HopFailureCause::NotTls => "not_tls",
            HopFailureCause::UnexpectedTls => "unexpected_tls",
            HopFailureCause::PlaintextForbidden => "plaintext_forbidden",
            HopFailureCause::RejectedByPeer => "rejected_by_peer",
            HopFailureCause::TimedOut => "timed_out",
            HopFailureCause::Other => "other",
        }
    }

    pub(super) fn of(error: &Error) -> HopFailureCause {
        match error {
            Error::InvalidCertificate(CertificateError::Other(OtherError(why))) if why.is::<WrongPeer>() => {
                HopFailureCause::WrongPeer
            }
            Error::InvalidCertificate(
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. },
            ) => HopFailureCause::OutsideValidity,
            Error::InvalidCertificate(_) => HopFailureCause::Untrusted,
            Error::InvalidMessage(_) => HopFailureCause::NotTls,
            // Alerts of a TLS server that do not reject this client.
            Error::AlertReceived(AlertDescription::CloseNotify | AlertDescription::InternalError) => {
                HopFailureCause::Other
            }
            Error::AlertReceived(_) => HopFailureCause::RejectedByPeer,
            _ => HopFailureCause::Other,
        }
    }

    /// Returns the cause of an I/O error, if TLS is the reason.
    pub(crate) fn of_io(error: &io::Error) -> Option<HopFailureCause> {
        error.get_ref()?.downcast_ref::<Error>().map(HopFailureCause::of)
    }
}

/// Wraps a name mismatch in the error type of rustls verifiers.
pub(super) fn wrong_peer(wrong: WrongPeer) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(std::sync::Arc::new(wrong))))
}
