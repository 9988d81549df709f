//! Creation of an authority with the first identities: that of a hub, and that of an operator. All others join with
//! tokens, which need a hub.
//!
//! ```text
//! DIR/authority/    certificate and key of the authority, and the records of the two certificates
//! DIR/hub/          identity of the first hub
//! DIR/operator/     identity of the first operator
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use regions::spiffe::Role;
use regions::{Catalogue, RegionId};
use scheduler_api::VERSION;
use scheduler_api::pki::{CertificateV1, IssuedV1, TrustV1};
use scheduler_client::authority::{KeyRequest, install_issued};
use scheduler_client::identity_folder::{IdentityFolder, write_private};
use scheduler_core::pki::issue::{VALIDITY, ValidityPeriod};
use scheduler_core::pki::rotation::CertificateRecord;
use scheduler_core::pki::subject::subject;
use scheduler_core::pki::trust::{CertificateSerial, TrustState};

use super::csr::RequestedKey;
use super::signer::{CertificateOrder, FileSigner, create_authority, only_authority, sign};

/// Records of the first certificates, which a hub writes to its store.
const ISSUED: &str = "issued.json";

/// Request for an authority with its first identities.
#[derive(Clone, Debug)]
pub struct NewAuthority<'a> {
    /// Folder of all of them.
    pub dir: &'a Path,
    /// Trust domain.
    pub domain: &'a str,
    /// Region of the first hub.
    pub region: &'a RegionId,
    /// Name of the first operator.
    pub operator: &'a str,
    /// Validity of the certificate of the operator, which no process renews.
    pub operator_validity: Duration,
    /// Addresses of the authority's listener, `HOST:PORT`.
    pub addresses: Vec<String>,
    /// Clouds and regions.
    pub catalogue: &'a Catalogue,
}

/// Folders of a new authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthorityFolders {
    /// Authority.
    pub authority: PathBuf,
    /// Identity of the first hub.
    pub hub: PathBuf,
    /// Identity of the first operator.
    pub operator: PathBuf,
    /// Fingerprint of the authority.
    pub fingerprint: String,
}

/// Creates an authority with its first identities. It blocks.
///
/// # Errors
///
/// When there is an authority in the folder, or the folder cannot be written.
pub fn create(request: &NewAuthority<'_>, now: Duration) -> Result<AuthorityFolders, String> {
    let NewAuthority { dir, domain, region, operator, operator_validity, addresses, catalogue } = request;
    let [authority_dir, hub, person] = ["authority", "hub", "operator"].map(|name| dir.join(name));
    for folder in [&authority_dir, &hub, &person] {
        if folder.exists() {
            return Err(format!("{} exists; choose another --dir", folder.display()));
        }
    }
    let hub_name =
        subject(domain, Role::Hub, Some(region), None, catalogue).map_err(|error| error.to_string())?;
    let operator_name = subject(domain, Role::Operator, None, Some(operator), catalogue);
    let operator_name = operator_name.map_err(|error| error.to_string())?;
    let authority = create_authority(&authority_dir, domain, now)?;
    let state = TrustState::new((*domain).to_owned(), authority.clone(), now);
    let signer = FileSigner::new(authority_dir.clone());
    let mut records = Vec::new();
    for (name, folder, validity) in [(hub_name, &hub, VALIDITY), (operator_name, &person, *operator_validity)]
    {
        let KeyRequest { key, csr } = KeyRequest::generate()?;
        let requested = RequestedKey::parse(&csr).map_err(|error| error.to_string())?;
        let serial = CertificateSerial::from_random(rand::random());
        let period = ValidityPeriod::starting(now, validity, authority.not_after)
            .map_err(|error| error.to_string())?;
        let order = CertificateOrder { subject: &name, serial: &serial, period, key: &requested.key };
        let certificate = sign(&signer, &authority, &order).map_err(|error| error.to_string())?;
        let record = CertificateRecord {
            serial,
            subject: name,
            not_before: period.not_before,
            not_after: period.not_after,
            authority: authority.fingerprint,
            renewals: 0,
            applied: state.generation,
        };
        let issued = IssuedV1 {
            version: VERSION,
            serial: record.serial.to_string(),
            authority: record.authority.to_string(),
            not_before_s: period.not_before.as_secs(),
            not_after_s: period.not_after.as_secs(),
            certificate,
            trust: TrustV1::from(&state),
        };
        install_issued(&IdentityFolder::new(folder), &issued, &key, addresses.clone())?;
        records.push(CertificateV1::from(&record));
    }
    let file = authority_dir.join(ISSUED);
    let text = serde_json::to_vec_pretty(&records).map_err(|error| error.to_string())?;
    write_private(&file, &text).map_err(|error| format!("{} cannot be written: {error}", file.display()))?;
    let fingerprint = authority.fingerprint.to_string();
    Ok(AuthorityFolders { authority: authority_dir, hub, operator: person, fingerprint })
}

/// Reads the authority of a folder for a store without one: the first state, and the records of the first certificates.
pub(super) fn read_first(dir: &Path, now: Duration) -> Result<(TrustState, Vec<CertificateRecord>), String> {
    let (authority, domain) = only_authority(dir)?;
    let file = dir.join(ISSUED);
    let problem = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let records = match std::fs::read(&file) {
        Ok(text) => {
            let read: Vec<CertificateV1> = serde_json::from_slice(&text).map_err(|error| problem(&error))?;
            let read = read.into_iter().map(CertificateRecord::try_from);
            read.collect::<Result<_, _>>().map_err(|error| problem(&error))?
        }
        // An authority from elsewhere, without first identities.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(problem(&error)),
    };
    Ok((TrustState::new(domain, authority, now), records))
}
