//! Why two ends did not come together, in a closed set of words for logs and metrics.

use gateway_core::spiffe::WrongPeer;
use rustls::{AlertDescription, CertificateError, Error, OtherError};
use std::io;

/// What was the matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A certificate of ours, and of somebody else than was meant.
    WrongPeer,
    /// A certificate that no authority in the file has signed, or that is not for this use.
    Untrusted,
    /// One that has expired, or is not valid yet.
    NotValidNow,
    /// What came is no TLS.
    NotTls,
    /// What came is TLS, where the port is in the clear.
    UnexpectedTls,
    /// It would have to be in the clear and leave this machine, which nobody has allowed.
    InTheClear,
    /// The other end does not take us.
    Refused,
    /// Not in time.
    TimedOut,
    /// Anything else, as no certificate at all or no version that both speak; the log has the library's words.
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

    /// The word for it.
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
            // Of a server these say that it speaks TLS and has nothing against us.
            Error::AlertReceived(AlertDescription::CloseNotify | AlertDescription::InternalError) => {
                Cause::Other
            }
            Error::AlertReceived(_) => Cause::Refused,
            _ => Cause::Other,
        }
    }

    /// That of an error of a stream, if TLS is behind it.
    pub(crate) fn of_io(error: &io::Error) -> Option<Cause> {
        error.get_ref()?.downcast_ref::<Error>().map(Cause::of)
    }
}

/// As rustls takes it from who verifies certificates.
pub(super) fn wrong_peer(wrong: WrongPeer) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(std::sync::Arc::new(wrong))))
}
