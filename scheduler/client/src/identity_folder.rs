//! Identity folder of a process or a person: certificate, key, trusted authorities and revoked certificates, as
//! [`identity`] reads them, and what is needed to renew them.
//!
//! ```text
//! certificate.pem    certificate, followed by that of its authority
//! key.pem            private key; never leaves the folder
//! authorities.pem    trusted authorities
//! revoked.json       revoked certificates
//! membership.json    addresses of the authority, validity of the certificate
//! trust.json         last trusted state, with its generation
//! ```
//!
//! A certificate and its key are two files, which no system replaces at once. Both are first written completely beside
//! the old ones, the certificate last; if its new file exists after a crash, the replacement is completed, otherwise
//! forgotten ([`IdentityFolder::recover`]).

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use identity::{IdentityFiles, RevocationList};
use scheduler_api::pki::{IssuedV1, TrustV1};
use scheduler_api::{MessageVersion, VERSION};
use scheduler_core::pki::issue::ValidityPeriod;
use scheduler_core::pki::trust::TrustState;
use serde::{Deserialize, Serialize};

use crate::snapshot::with_suffix;

const MEMBERSHIP: &str = "membership.json";
const TRUST: &str = "trust.json";
/// Suffix of a file that is complete and about to replace the one without it.
const NEXT: &str = ".next";
/// Maximum bytes of a file of the folder.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Identity folder.
#[derive(Clone, Debug)]
pub struct IdentityFolder {
    dir: PathBuf,
}

/// Membership of the owner of a folder in the fleet of an authority.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// Version of the file.
    pub version: MessageVersion,
    /// Addresses of the authority, `HOST:PORT`.
    pub addresses: Vec<String>,
    /// Serial number of the certificate.
    pub serial: String,
    /// Fingerprint of its authority.
    pub authority: String,
    /// First second of its validity, since 1970.
    pub not_before_s: u64,
    /// Last second of its validity.
    pub not_after_s: u64,
}

impl Membership {
    /// Returns the membership of the owner of an issued certificate.
    pub fn of(issued: &IssuedV1, addresses: Vec<String>) -> Membership {
        let IssuedV1 { version: _, serial, authority, not_before_s, not_after_s, certificate: _, trust: _ } =
            issued;
        Membership {
            version: VERSION,
            addresses,
            serial: serial.clone(),
            authority: authority.clone(),
            not_before_s: *not_before_s,
            not_after_s: *not_after_s,
        }
    }

    /// Returns the validity of the certificate.
    pub fn period(&self) -> ValidityPeriod {
        let seconds = Duration::from_secs;
        ValidityPeriod { not_before: seconds(self.not_before_s), not_after: seconds(self.not_after_s) }
    }
}

impl IdentityFolder {
    /// Returns the folder at this path, which need not exist.
    pub fn new(dir: impl Into<PathBuf>) -> IdentityFolder {
        IdentityFolder { dir: dir.into() }
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Returns the files for [`identity::ProcessIdentity`].
    pub fn files(&self) -> IdentityFiles {
        IdentityFiles::in_directory(&self.dir)
    }

    /// Returns whether the folder has a certificate and a key.
    pub fn has_certificate(&self) -> bool {
        self.file(IdentityFiles::CERTIFICATE).exists() && self.file(IdentityFiles::KEY).exists()
    }

    /// Completes or forgets a replacement of the certificate that a crash has interrupted.
    ///
    /// # Errors
    ///
    /// When the folder cannot be changed.
    pub fn recover(&self) -> io::Result<()> {
        let is_complete = self.next(IdentityFiles::CERTIFICATE).exists();
        for name in [IdentityFiles::KEY, MEMBERSHIP, IdentityFiles::CERTIFICATE] {
            let next = self.next(name);
            match if is_complete { fs::rename(&next, self.file(name)) } else { fs::remove_file(&next) } {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        if self.dir.exists() { sync(&self.dir) } else { Ok(()) }
    }

    /// Reads the membership; `None` for a folder that another tool fills.
    ///
    /// # Errors
    ///
    /// When the file cannot be read.
    pub fn membership(&self) -> io::Result<Option<Membership>> {
        self.json(MEMBERSHIP)
    }

    /// Reads the last trusted state; `None` if there is none.
    ///
    /// # Errors
    ///
    /// When the file cannot be read.
    pub fn trust(&self) -> io::Result<Option<TrustState>> {
        let Some(wire) = self.json::<TrustV1>(TRUST)? else { return Ok(None) };
        TrustState::try_from(wire).map(Some).map_err(io::Error::other)
    }

    /// Writes a certificate with its key, replacing the present ones.
    ///
    /// # Errors
    ///
    /// When the folder cannot be written. The present certificate and key stay, or the replacement is completed by
    /// [`IdentityFolder::recover`].
    pub fn install(&self, certificate: &str, key: &str, membership: &Membership) -> io::Result<()> {
        create_private(&self.dir)?;
        let membership = serde_json::to_vec_pretty(membership)?;
        write_private(&self.next(IdentityFiles::KEY), key.as_bytes())?;
        write_private(&self.next(MEMBERSHIP), &membership)?;
        write_private(&self.next(IdentityFiles::CERTIFICATE), certificate.as_bytes())?;
        self.recover()
    }

    /// Writes the trusted state, for this process and for one that starts while no hub is reachable.
    ///
    /// # Errors
    ///
    /// When the folder cannot be written.
    pub fn write_trust(&self, state: &TrustState) -> io::Result<()> {
        create_private(&self.dir)?;
        let authorities: String = state.authorities.iter().map(|it| it.certificate.as_str()).collect();
        let serials = state.revoked.keys().filter_map(|serial| serial.as_str().parse().ok()).collect();
        let revoked = RevocationList { generation: state.generation, serials };
        write_private(&self.file(IdentityFiles::AUTHORITIES), authorities.as_bytes())?;
        write_private(&self.file(IdentityFiles::REVOKED), revoked.to_json().as_bytes())?;
        // Last: after a crash before it, the state is received and written again.
        write_private(&self.file(TRUST), &serde_json::to_vec(&TrustV1::from(state))?)
    }

    fn json<T: serde::de::DeserializeOwned>(&self, name: &str) -> io::Result<Option<T>> {
        let file = self.file(name);
        let named = |error: &dyn std::fmt::Display| io::Error::other(format!("{}: {error}", file.display()));
        match fs::metadata(&file) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(named(&error)),
            Ok(found) if found.len() > FILE_BYTES_MAX => {
                return Err(named(&format!("has more than {FILE_BYTES_MAX} bytes")));
            }
            Ok(_) => {}
        }
        let text = fs::read(&file).map_err(|error| named(&error))?;
        serde_json::from_slice(&text).map(Some).map_err(|error| named(&error))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn next(&self, name: &str) -> PathBuf {
        with_suffix(&self.file(name), NEXT)
    }
}

/// Creates a folder that only its owner can enter, unless it exists.
///
/// # Errors
///
/// When it cannot be created.
pub fn create_private(dir: &Path) -> io::Result<()> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    created.map_err(|error| {
        io::Error::new(error.kind(), format!("{} cannot be created: {error}", dir.display()))
    })
}

/// Replaces a file by one that only its owner can read. After a crash, the file has its old or its new content.
///
/// # Errors
///
/// When it cannot be written.
pub fn write_private(file: &Path, content: &[u8]) -> io::Result<()> {
    let new = with_suffix(file, ".new");
    // One that a crash has left may be readable for others.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut open = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    open.write_all(content)?;
    open.sync_all()?;
    fs::rename(&new, file)?;
    file.parent().map_or(Ok(()), sync)
}

/// Writes the entries of a folder to disk.
fn sync(dir: &Path) -> io::Result<()> {
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn membership(serial: &str) -> Membership {
        Membership {
            version: VERSION,
            addresses: vec!["hub:7001".to_owned()],
            serial: serial.to_owned(),
            authority: String::new(),
            not_before_s: 1,
            not_after_s: 2,
        }
    }

    fn content(folder: &IdentityFolder) -> (String, String, String) {
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        (
            read(IdentityFiles::CERTIFICATE),
            read(IdentityFiles::KEY),
            folder.membership().unwrap().unwrap().serial,
        )
    }

    fn texts(certificate: &str, key: &str, serial: &str) -> (String, String, String) {
        (certificate.to_owned(), key.to_owned(), serial.to_owned())
    }

    #[test]
    fn a_certificate_and_its_key_are_replaced_together_at_whatever_step_a_crash_happens() {
        let dir = tempfile::tempdir().unwrap();
        let folder = IdentityFolder::new(dir.path().join("identity"));
        folder.install("certificate 1", "key 1", &membership("01")).unwrap();
        assert_eq!(content(&folder), texts("certificate 1", "key 1", "01"));
        let next = |name: &str| folder.next(name);
        let new = serde_json::to_vec(&membership("02")).unwrap();
        // Before the certificate is written completely, the old one stays.
        fs::write(next(IdentityFiles::KEY), "key 2").unwrap();
        fs::write(next(MEMBERSHIP), &new).unwrap();
        fs::write(with_suffix(&next(IdentityFiles::CERTIFICATE), ".new"), "certif").unwrap();
        folder.recover().unwrap();
        assert_eq!(content(&folder), texts("certificate 1", "key 1", "01"));
        // Afterwards the new one is used, however many files were renamed.
        for renamed in 0..3 {
            folder.install("certificate 1", "key 1", &membership("01")).unwrap();
            fs::write(next(IdentityFiles::KEY), "key 2").unwrap();
            fs::write(next(MEMBERSHIP), &new).unwrap();
            fs::write(next(IdentityFiles::CERTIFICATE), "certificate 2").unwrap();
            for name in [IdentityFiles::KEY, MEMBERSHIP, IdentityFiles::CERTIFICATE].iter().take(renamed) {
                fs::rename(next(name), folder.file(name)).unwrap();
            }
            folder.recover().unwrap();
            assert_eq!(content(&folder), texts("certificate 2", "key 2", "02"), "{renamed} renamed");
        }
    }

    #[test]
    fn files_are_readable_for_their_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let folder = IdentityFolder::new(dir.path().join("identity"));
        fs::create_dir(folder.path()).unwrap();
        fs::write(folder.path().join("key.pem.next.new"), "left by a crash").unwrap();
        folder.install("certificate", "key", &membership("01")).unwrap();
        for name in [IdentityFiles::CERTIFICATE, IdentityFiles::KEY, MEMBERSHIP] {
            let mode = fs::metadata(folder.file(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
        assert!(folder.has_certificate() && !IdentityFolder::new("/nowhere").has_certificate());
    }

    #[test]
    fn the_trusted_state_is_read_back_and_an_unreadable_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let folder = IdentityFolder::new(dir.path());
        assert_eq!(folder.trust().unwrap(), None);
        let authority = scheduler_core::pki::trust::TrustedAuthority {
            fingerprint: scheduler_core::pki::token::Fingerprint::of(b"1"),
            certificate: "pem\n".to_owned(),
            not_after: Duration::from_secs(9),
        };
        let state = TrustState::new("m".to_owned(), authority, Duration::from_secs(1));
        let state =
            state.revoke([("0a0b".parse().unwrap(), Duration::from_secs(9))], Duration::ZERO).unwrap();
        folder.write_trust(&state).unwrap();
        assert_eq!(folder.trust().unwrap(), Some(state.clone()));
        let revoked =
            RevocationList::parse(&fs::read(dir.path().join(IdentityFiles::REVOKED)).unwrap()).unwrap();
        assert_eq!((revoked.generation, revoked.serials.len()), (state.generation, 1));
        fs::write(dir.path().join(TRUST), "{").unwrap();
        assert!(folder.trust().unwrap_err().to_string().contains("trust.json"));
    }
}
