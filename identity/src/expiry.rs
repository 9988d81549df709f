//! Metrics of the certificates of a process: their validity, and failed renewals.

use crate::certificate::TlsIdentity;
use crate::section::Transport;
use metrics::{Counter, metric_set};
use rustls::pki_types::CertificateDer;
use std::sync::LazyLock;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

/// Validity of a certificate, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CertificateValidity {
    /// First second.
    pub not_before: u64,
    /// Last second.
    pub not_after: u64,
}

impl CertificateValidity {
    /// Returns the validity of a certificate; `None` if it cannot be read. Times before 1970 count as 1970.
    pub(crate) fn of(certificate: &CertificateDer<'_>) -> Option<CertificateValidity> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let [not_before, not_after] = [parsed.validity().not_before, parsed.validity().not_after]
            .map(|time| u64::try_from(time.timestamp()).unwrap_or(0));
        Some(CertificateValidity { not_before, not_after })
    }
}

static RENEWAL_FAILURES: LazyLock<Counter> = LazyLock::new(Counter::default);

/// Counts a renewal of a certificate of this process that failed.
pub fn count_renewal_failure() {
    RENEWAL_FAILURES.add(1);
}

metric_set! {
    /// Certificate of a process.
    #[derive(Debug)]
    pub struct CertificateMetrics {
        /// Start of the validity of the certificate of the process, in seconds since 1970; absent in plaintext.
        not_before: Option<u64> = "meridian_{role}_certificate_not_before_seconds",
        /// End of the validity of the certificate of the process, in seconds since 1970; absent in plaintext.
        not_after: Option<u64> = "meridian_{role}_certificate_not_after_seconds",
        /// Renewals by the built-in authority that failed, of the certificate of the process or of its replicas.
        renewal_failures: &'static Counter = "meridian_{role}_certificate_renewal_failures_total",
    }
}

impl CertificateMetrics {
    /// Returns the current values for a process with this transport.
    pub fn read(transport: &Transport) -> CertificateMetrics {
        let validity = transport.identity().and_then(|identity| identity.certificate().validity());
        CertificateMetrics {
            not_before: validity.map(|validity| validity.not_before),
            not_after: validity.map(|validity| validity.not_after),
            renewal_failures: &RENEWAL_FAILURES,
        }
    }
}

impl TlsIdentity {
    /// Returns the validity of the current certificate.
    pub fn validity(&self) -> Option<CertificateValidity> {
        CertificateValidity::of(self.certified_key().cert.first()?)
    }
}
