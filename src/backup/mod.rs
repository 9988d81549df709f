//! `meridian backup` and `meridian restore`: the state of a hub in one file.
//!
//! A backup is a tar file, encrypted if a passphrase is given:
//!
//! ```text
//! store.json        content of the store
//! authority/...     certificates and keys of the authority
//! identity/...      identity of the hub
//! receipts/...      receipts, if a directory is given
//! ```
//!
//! The store of a hub that runs is read through its authority, at one revision; the other files are read from disk, so the
//! command runs on the machine of the hub. A hub on etcd has the store's part in etcd's own snapshot (`etcdctl snapshot
//! save`), so it is left out.

mod seal;

use crate::apply::{CommandError, operator_token, run};
use crate::cli::{BackupOptions, CallerOptions, RestoreOptions};
use crate::roles::read_config;
use resolver::{DnsSection, Resolver};
use scheduler::config::{HubConfig, StoreConfig};
use scheduler::hub::backup::{self as store, StoreBackupV1};
use scheduler::hub::pki;
use scheduler_api::paths;
use scheduler_client::authority::AuthorityConnection;
use scheduler_client::identity_folder::{IdentityFolder, create_private, write_private};
use scheduler_client::unix_time;
use seal::{MAGIC, OpeningReader, Passphrase, SealingWriter};
use serde_json::json;
use std::collections::BTreeMap;
use std::env::VarError;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Chain, Cursor, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

/// Variable with the passphrase, if no file is given.
const PASSPHRASE_VARIABLE: &str = "MERIDIAN_BACKUP_PASSPHRASE";
/// Part of a backup with the store.
const STORE: &str = "store.json";
/// Folders in a backup.
const AUTHORITY: &str = "authority";
const IDENTITY: &str = "identity";
const RECEIPTS: &str = "receipts";
/// Maximum bytes of the store in a backup.
const STORE_BYTES_MAX: u64 = 256 << 20;

/// Runs `meridian backup`.
pub(crate) fn backup(options: &BackupOptions) -> ExitCode {
    run(options.json, async {
        let BackupOptions { file, config, caller, authority, receipts, passphrase_file, json } = options;
        let hub: HubConfig = read_config(config, HubConfig::read).map_err(CommandError::Usage)?;
        let passphrase = passphrase(passphrase_file.as_deref())?;
        let content = match &hub.store {
            StoreConfig::Embedded { data } => Some(read_store(data, caller, authority).await?),
            StoreConfig::Etcd(_) => None,
        };
        let failed = |error: io::Error| CommandError::Failed(format!("{}: {error}", file.display()));
        let folders = folders(&hub, receipts.as_deref());
        write(file, passphrase.as_ref(), content.as_ref(), &folders).map_err(failed)?;
        let entries = content.as_ref().map(|content| content.entries.len());
        if *json {
            let encrypted = passphrase.is_some();
            return Ok(format!("{:#}", json!({"file": file, "encrypted": encrypted, "entries": entries})));
        }
        let mut text = match entries {
            Some(entries) => format!("{} has {entries} entries of the store", file.display()),
            None => {
                format!("{} has no store: save that of etcd with `etcdctl snapshot save`", file.display())
            }
        };
        if passphrase.is_none() && hub.authority.is_some() {
            text.push_str(
                "; it has the key of the authority and is not encrypted: keep it where only operators read",
            );
        }
        Ok(text)
    })
}

/// Reads the store: through the hub with the identity of an operator, or from the file of a stopped hub.
async fn read_store(
    data: &Path,
    caller: &CallerOptions,
    authority: &[String],
) -> Result<StoreBackupV1, CommandError> {
    let resolver = Resolver::new(&DnsSection::default());
    if let Some(token) = operator_token(caller)? {
        let mut connection = AuthorityConnection::with_operator_token(&token, authority, &resolver).await?;
        return Ok(connection.get(paths::BACKUP).await?);
    }
    let Some(identity) = &caller.identity else {
        let read = store::read_stopped(data).await;
        return read.map_err(|error| {
            CommandError::Failed(format!(
                "{error}; if the hub runs, give --identity with the folder of an operator"
            ))
        });
    };
    let folder = IdentityFolder::new(identity);
    let membership = folder.membership().map_err(|error| error.to_string())?;
    let addresses = membership.map(|it| it.addresses).unwrap_or_default();
    let mut connection = AuthorityConnection::with_identity(&folder, &addresses, &resolver).await?;
    Ok(connection.get(paths::BACKUP).await?)
}

/// Returns the folders of a hub, by their names in a backup.
fn folders(hub: &HubConfig, receipts: Option<&Path>) -> BTreeMap<&'static str, PathBuf> {
    let mut folders = BTreeMap::new();
    if let Some(authority) = &hub.authority {
        folders.insert(AUTHORITY, authority.dir.clone());
        folders.insert(IDENTITY, authority.identity.clone());
    }
    if let Some(receipts) = receipts {
        folders.insert(RECEIPTS, receipts.to_owned());
    }
    folders
}

fn write(
    file: &Path,
    passphrase: Option<&Passphrase>,
    store: Option<&StoreBackupV1>,
    folders: &BTreeMap<&'static str, PathBuf>,
) -> io::Result<()> {
    let part = scheduler_client::snapshot::with_suffix(file, ".part");
    match fs::remove_file(&part) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let new = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part)?;
    let to = BufWriter::new(new);
    let to = match passphrase {
        Some(passphrase) => {
            let sealed = SealingWriter::new(to, passphrase, rand::random())?;
            append(sealed, store, folders)?.finish()?
        }
        None => append(to, store, folders)?,
    };
    let written = to.into_inner().map_err(|error| error.into_error())?;
    written.sync_all()?;
    fs::rename(part, file)
}

fn append<W: Write>(
    to: W,
    store: Option<&StoreBackupV1>,
    folders: &BTreeMap<&'static str, PathBuf>,
) -> io::Result<W> {
    let mut archive = tar::Builder::new(to);
    archive.follow_symlinks(true);
    // Folders first and the store last: the store of a restored hub exists only if all else was restored.
    for (name, folder) in folders {
        if folder.exists() {
            archive.append_dir_all(name, folder)?;
        }
    }
    if let Some(store) = store {
        let text = serde_json::to_vec(store)?;
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        archive.append_data(&mut header, STORE, text.as_slice())?;
    }
    archive.into_inner()
}

/// Runs `meridian restore`.
pub(crate) fn restore(options: &RestoreOptions) -> ExitCode {
    run(options.json, async {
        let RestoreOptions { file, config, receipts, passphrase_file, json } = options;
        let passphrase = passphrase(passphrase_file.as_deref())?;
        let text =
            fs::read_to_string(config).map_err(|error| format!("--config {}: {error}", config.display()))?;
        let targets = RestoreTargets::read(&text, crate::roles::base(config), receipts.as_deref())?;
        let failed = |error: io::Error| CommandError::Failed(format!("{}: {error}", file.display()));
        let backup = read(file, passphrase.as_ref(), &targets).map_err(failed)?;
        let epoch = match (backup, &targets.data) {
            (Some(backup), Some(data)) => {
                let restored = store::restore(data, &backup, unix_time()).await;
                Some(restored.map_err(|error| CommandError::Failed(error.to_string()))?)
            }
            (Some(_), None) => {
                let problem = "the backup has an embedded store, but the configuration has no `data`";
                return Err(CommandError::Failed(problem.to_owned()));
            }
            (None, _) => {
                // A token that was used after the snapshot of etcd would be valid again.
                if let Some(identity) = targets.folders.get(IDENTITY) {
                    pki::distrust_tokens(identity).map_err(failed)?;
                }
                None
            }
        };
        if *json {
            return Ok(format!("{:#}", json!({"epoch": epoch})));
        }
        let mut lines = vec![match epoch {
            Some(epoch) => format!("restored; the store begins epoch {epoch}"),
            None => "restored; restore the store with `etcdctl snapshot restore`".to_owned(),
        }];
        if epoch.is_none() {
            lines.push("The hub deletes all join tokens of the store when it starts.".to_owned());
        }
        lines.push(
            "Unused join tokens are not restored: create them again. Repeat revocations that were made after the backup: \
             processes that know them keep them, others do not."
                .to_owned(),
        );
        Ok(lines.join("\n"))
    })
}

/// Directories that a restoration creates. The configuration is read without loading the identity, which does not exist yet.
struct RestoreTargets {
    data: Option<PathBuf>,
    folders: BTreeMap<&'static str, PathBuf>,
}

impl RestoreTargets {
    fn read(text: &str, base: &Path, receipts: Option<&Path>) -> Result<RestoreTargets, CommandError> {
        let file: toml::Table = text.parse().map_err(|error| format!("--config: {error}"))?;
        let path = |section: Option<&str>, key: &str| {
            let table = match section {
                Some(section) => file.get(section)?.as_table()?,
                None => &file,
            };
            Some(base.join(table.get(key)?.as_str()?))
        };
        let known = [
            (AUTHORITY, path(Some("authority"), "dir")),
            (IDENTITY, path(Some("identity"), "dir")),
            (RECEIPTS, receipts.map(Path::to_owned)),
        ];
        let folders: BTreeMap<_, _> =
            known.into_iter().filter_map(|(name, path)| Some((name, path?))).collect();
        let data = path(None, "data");
        for folder in folders.values().chain(&data) {
            let is_empty = match fs::read_dir(folder) {
                Ok(mut entries) => entries.next().is_none(),
                Err(_) => true,
            };
            if !is_empty {
                let problem = "is not empty; restore into empty directories, or move it away";
                return Err(CommandError::Failed(format!("{} {problem}", folder.display())));
            }
        }
        Ok(RestoreTargets { data, folders })
    }

    /// Returns the file for a path in a backup; `None` for one that is not restored.
    fn file(&self, path: &Path) -> Option<PathBuf> {
        let mut parts = path.components();
        let folder = self.folders.get(parts.next()?.as_os_str().to_str()?)?;
        let rest = parts.as_path();
        // A path out of the folder is not one of ours.
        let is_inside = rest.components().all(|part| matches!(part, Component::Normal(_)));
        (is_inside && !rest.as_os_str().is_empty()).then(|| folder.join(rest))
    }
}

/// Writes the files of a backup, and returns its store.
fn read(
    file: &Path,
    passphrase: Option<&Passphrase>,
    targets: &RestoreTargets,
) -> io::Result<Option<StoreBackupV1>> {
    let mut from = BufReader::new(File::open(file)?);
    let mut magic = Vec::new();
    from.by_ref().take(MAGIC.len() as u64).read_to_end(&mut magic)?;
    match (magic == MAGIC, passphrase) {
        (true, Some(passphrase)) => unpack(OpeningReader::new(from, passphrase)?, targets),
        (true, None) => Err(io::Error::other(format!(
            "is encrypted; give --passphrase-file, or set {PASSPHRASE_VARIABLE}"
        ))),
        (false, _) => {
            let whole: Chain<Cursor<Vec<u8>>, BufReader<File>> = Cursor::new(magic).chain(from);
            unpack(whole, targets)
        }
    }
}

fn unpack(from: impl Read, targets: &RestoreTargets) -> io::Result<Option<StoreBackupV1>> {
    let mut archive = tar::Archive::new(from);
    let mut store = None;
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        if !entry.header().entry_type().is_file() {
            continue;
        }
        if path == Path::new(STORE) {
            let mut text = Vec::new();
            entry.by_ref().take(STORE_BYTES_MAX).read_to_end(&mut text)?;
            store = Some(serde_json::from_slice(&text)?);
        } else if let Some(file) = targets.file(&path) {
            if let Some(folder) = file.parent() {
                create_private(folder)?;
            }
            let mut content = Vec::new();
            entry.read_to_end(&mut content)?;
            write_private(&file, &content)?;
        }
    }
    // The rest authenticates the end of an encrypted backup.
    io::copy(&mut archive.into_inner(), &mut io::sink())?;
    Ok(store)
}

fn passphrase(file: Option<&Path>) -> Result<Option<Passphrase>, CommandError> {
    let (source, text) = match file {
        Some(file) => {
            let source = format!("--passphrase-file {}", file.display());
            let text = fs::read_to_string(file).map_err(|error| format!("{source}: {error}"))?;
            (source, text)
        }
        None => match std::env::var(PASSPHRASE_VARIABLE) {
            Ok(text) if !text.is_empty() => (PASSPHRASE_VARIABLE.to_owned(), text),
            Ok(_) | Err(VarError::NotPresent) => return Ok(None),
            // Without the passphrase the backup would not be encrypted.
            Err(VarError::NotUnicode(_)) => {
                let fix = "set it to a text in UTF-8, or use --passphrase-file";
                return Err(format!("{PASSPHRASE_VARIABLE} is not UTF-8; {fix}").into());
            }
        },
    };
    Ok(Some(Passphrase::read(&text).map_err(|problem| format!("{source} {problem}"))?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler::hub::backup::BackupEntryV1;
    use scheduler_api::VERSION;

    fn backup() -> StoreBackupV1 {
        let entry = BackupEntryV1 { key: "meta/epoch".to_owned(), value: "Nw==".to_owned() };
        StoreBackupV1 { version: VERSION, entries: vec![entry] }
    }

    #[test]
    fn a_backup_is_restored_with_its_files_and_their_permissions() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a folder");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("authority")).expect("a folder");
        fs::create_dir_all(at("receipts/2026")).expect("a folder");
        fs::write(at("authority/authority-1.key"), "secret").expect("written");
        fs::write(at("receipts/2026/chain"), "receipt").expect("written");
        let folders = BTreeMap::from([(AUTHORITY, at("authority")), (RECEIPTS, at("receipts"))]);
        let text =
            "data = \"new/data\"\n[authority]\ndir = \"new/authority\"\n[identity]\ndir = \"new/hub\"\n";
        for passphrase in [None, Some(Passphrase::read("correct horse battery").expect("long enough"))] {
            let file = at("backup");
            write(&file, passphrase.as_ref(), Some(&backup()), &folders).expect("written");
            let content = fs::read(&file).expect("the backup");
            let is_plain = content.windows(6).any(|part| part == b"secret");
            assert_eq!(is_plain, passphrase.is_none());
            fs::remove_dir_all(at("new")).ok();
            let receipts = at("new/receipts");
            let targets = RestoreTargets::read(text, dir.path(), Some(&receipts)).expect("empty folders");
            assert_eq!(read(&file, passphrase.as_ref(), &targets).expect("it is intact"), Some(backup()));
            let key = at("new/authority/authority-1.key");
            assert_eq!(fs::read_to_string(&key).expect("restored"), "secret");
            assert_eq!(fs::metadata(&key).expect("restored").permissions().mode() & 0o777, 0o600);
            assert_eq!(fs::read_to_string(at("new/receipts/2026/chain")).expect("restored"), "receipt");
            assert!(RestoreTargets::read(text, dir.path(), None).is_err(), "the folders are not empty");
            if passphrase.is_some() {
                let error = read(&file, None, &targets).expect_err("it is encrypted").to_string();
                assert!(error.contains("--passphrase-file"), "{error}");
            }
        }
    }

    #[test]
    fn a_path_out_of_the_folders_is_not_restored() {
        let dir = tempfile::tempdir().expect("a folder");
        let targets = RestoreTargets::read("[authority]\ndir = \"a\"\n", dir.path(), None).expect("empty");
        assert_eq!(targets.file(Path::new("authority/x")), Some(dir.path().join("a/x")));
        for path in ["authority", "authority/../x", "../x", "/etc/passwd", "receipts/x", "x"] {
            assert_eq!(targets.file(Path::new(path)), None, "{path}");
        }
    }
}
