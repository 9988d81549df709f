//! Revoked certificates: a list of serial numbers with a generation, and the open connections that a new list ends.
//!
//! The list comes from a file and from the hubs; the one with the highest generation is in force, so that an older file
//! does not restore a revoked certificate. It is checked at every handshake, also of resumed sessions, and when it
//! changes, the open connections of the certificates that it adds are closed at once.

use crate::reload;
use futures_util::task::AtomicWaker;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use supervision::task::blocking;
use supervision::{Mutex, RwLock};
use tokio::sync::Notify;

/// Maximum number of revoked certificates. Those that have expired can be removed from the list.
pub const REVOKED_MAX: usize = 65_536;
/// Maximum size of the file: each serial number has at most 40 digits and some punctuation.
const FILE_BYTES_MAX: u64 = 64 * REVOKED_MAX as u64;
/// Maximum bytes of a serial number (RFC 5280, 4.1.2.2).
const SERIAL_BYTES_MAX: usize = 20;

/// Serial number of a certificate.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SerialNumber(Box<[u8]>);

impl SerialNumber {
    /// Creates a serial number of its bytes, highest first.
    pub fn of(bytes: &[u8]) -> SerialNumber {
        let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
        SerialNumber(bytes[zeros..].into())
    }
}

impl fmt::Display for SerialNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SerialNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for SerialNumber {
    type Err = String;

    fn from_str(text: &str) -> Result<SerialNumber, String> {
        let wrong = || {
            let shown: String = text.chars().take(2 * SERIAL_BYTES_MAX).collect();
            format!(
                "\"{shown}\" is not a serial number; write an even number of hexadecimal digits, at most 40"
            )
        };
        let digits = text.as_bytes();
        if digits.is_empty() || digits.len() % 2 == 1 || digits.len() > 2 * SERIAL_BYTES_MAX {
            return Err(wrong());
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).ok_or_else(wrong);
        let byte = |pair: &[u8]| Ok::<_, String>((digit(pair[0])? << 4 | digit(pair[1])?) as u8);
        Ok(SerialNumber::of(&digits.chunks(2).map(byte).collect::<Result<Vec<_>, _>>()?))
    }
}

/// List of revoked certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RevocationList {
    /// Generation; a list replaces one with a lower generation.
    pub generation: u64,
    /// Serial numbers of the certificates.
    pub serials: BTreeSet<SerialNumber>,
}

/// Form of a list as JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RevokedV1 {
    version: u32,
    generation: u64,
    serials: Vec<String>,
}

impl RevocationList {
    /// Reads a list.
    ///
    /// # Errors
    ///
    /// The problem of an invalid list.
    pub fn parse(text: &[u8]) -> Result<RevocationList, String> {
        let read: RevokedV1 = serde_json::from_slice(text)
            .map_err(|error| format!("is not a list of revoked certificates: {error}"))?;
        let RevokedV1 { version, generation, serials } = read;
        if version != 1 {
            return Err(format!(
                "has version {version}, and this release reads version 1; update this process"
            ));
        }
        if serials.len() > REVOKED_MAX {
            let count = serials.len();
            return Err(format!(
                "has {count} serial numbers, more than {REVOKED_MAX}; remove expired certificates"
            ));
        }
        let serials = serials.iter().map(|serial| serial.parse()).collect::<Result<_, String>>()?;
        Ok(RevocationList { generation, serials })
    }

    /// Returns the list as JSON.
    pub fn to_json(&self) -> String {
        let serials = self.serials.iter().map(ToString::to_string).collect();
        let written = RevokedV1 { version: 1, generation: self.generation, serials };
        serde_json::to_string(&written).expect("a list of strings serialises to JSON")
    }
}

/// Revoked certificates, and the open connections.
#[derive(Debug)]
pub struct Revocations {
    /// Key of the file in the configuration.
    name: &'static str,
    file: Option<PathBuf>,
    list: RwLock<Arc<RevocationList>>,
    open: Mutex<OpenPeers>,
}

/// Open connections of authenticated peers.
#[derive(Debug, Default)]
struct OpenPeers {
    next: u64,
    connections: BTreeMap<u64, (SerialNumber, Arc<Closing>)>,
}

/// Signal that ends a connection.
#[derive(Debug, Default)]
struct Closing {
    is_closed: AtomicBool,
    signal: Notify,
    reader: AtomicWaker,
    writer: AtomicWaker,
}

/// Registration of an open connection. It ends when this is dropped.
#[derive(Debug)]
pub struct ConnectionGuard {
    number: u64,
    closing: Arc<Closing>,
    revocations: Arc<Revocations>,
}

impl Revocations {
    /// Loads the file, if it exists.
    pub(crate) fn load(name: &'static str, file: Option<PathBuf>) -> Result<Revocations, String> {
        let list = match &file {
            Some(path) => {
                read(path).map_err(|problem| format!("{name} = \"{}\" {problem}", path.display()))?
            }
            None => None,
        };
        let list = RwLock::independent(Arc::new(list.unwrap_or_default()));
        Ok(Revocations { name, file, list, open: Mutex::independent(OpenPeers::default()) })
    }

    /// Returns the path of the file.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Returns the list in force.
    pub fn list(&self) -> Arc<RevocationList> {
        self.list.read().clone()
    }

    /// Returns whether a certificate is revoked.
    pub fn contains(&self, serial: &SerialNumber) -> bool {
        self.list.read().serials.contains(serial)
    }

    /// Puts a list in force if its generation is higher than that of the current one, and closes the connections of the
    /// certificates in it. Returns the number of closed connections, or `None` for an older list.
    pub fn accept(&self, list: RevocationList) -> Option<usize> {
        let list = Arc::new(list);
        {
            let mut current = self.list.write();
            if list.generation <= current.generation {
                return None;
            }
            *current = list.clone();
        }
        let open = self.open.lock();
        let revoked = open.connections.values().filter(|(serial, _)| list.serials.contains(serial));
        Some(revoked.map(|(_, closing)| closing.close()).count())
    }

    /// Registers an open connection; `None` if its certificate is revoked.
    pub(crate) fn admit(self: &Arc<Self>, serial: SerialNumber) -> Option<ConnectionGuard> {
        let closing: Arc<Closing> = Arc::default();
        let number = {
            let mut open = self.open.lock();
            open.next += 1;
            let number = open.next;
            open.connections.insert(number, (serial.clone(), closing.clone()));
            number
        };
        // Registered first: a list that is put in force now finds the connection.
        let guard = ConnectionGuard { number, closing, revocations: self.clone() };
        (!self.contains(&serial)).then_some(guard)
    }

    /// Reloads the file periodically; never returns.
    pub(crate) async fn follow(self: Arc<Revocations>) {
        let Some(file) = self.file.clone() else { return std::future::pending().await };
        let mut interval = reload::interval();
        let mut last_problem = None;
        loop {
            interval.tick().await;
            let path = file.clone();
            match blocking(move || read(&path)).await {
                Ok(list) => {
                    last_problem = None;
                    let Some(list) = list else { continue };
                    let (generation, revoked) = (list.generation, list.serials.len());
                    if let Some(closed) = self.accept(list) {
                        // The file of revocations has changed; `closed` connections with revoked certificates were
                        // closed.
                        tracing::info!(generation, revoked, closed, "revoked certificates reloaded");
                    }
                }
                Err(problem) if last_problem.as_ref() != Some(&problem) => {
                    // The previous revocations hold, and newer ones have no effect. Correct the file of this `key`; it
                    // is read again when it changes.
                    tracing::error!(
                        key = self.name,
                        problem,
                        "failed to reload the revoked certificates; keeping the previous ones"
                    );
                    last_problem = Some(problem);
                }
                Err(_) => {}
            }
        }
    }
}

/// Reads a list; `None` if there is no file.
fn read(path: &Path) -> Result<Option<RevocationList>, String> {
    let unreadable = |error: std::io::Error| format!("cannot be read: {error}");
    match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(error)),
        Ok(file) if file.len() > FILE_BYTES_MAX => {
            return Err(format!("has {} bytes, more than {FILE_BYTES_MAX}", file.len()));
        }
        Ok(_) => {}
    }
    let text = std::fs::read(path).map_err(unreadable)?;
    RevocationList::parse(&text).map(Some)
}

impl Closing {
    fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.signal.notify_waiters();
        self.reader.wake();
        self.writer.wake();
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }
}

impl ConnectionGuard {
    /// Returns whether the certificate of the peer has been revoked.
    pub fn is_revoked(&self) -> bool {
        self.closing.is_closed()
    }

    /// Completes when the certificate of the peer is revoked.
    pub async fn revoked(&self) {
        let mut signal = std::pin::pin!(self.closing.signal.notified());
        signal.as_mut().enable();
        if !self.is_revoked() {
            signal.await;
        }
    }

    /// Registers the task that waits for bytes of the peer.
    pub(crate) fn wakes_reader(&self, waker: &std::task::Waker) {
        self.closing.reader.register(waker);
    }

    /// Registers the task that waits until the peer takes bytes.
    pub(crate) fn wakes_writer(&self, waker: &std::task::Waker) {
        self.closing.writer.register(waker);
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.revocations.open.lock().connections.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(generation: u64, serials: &[&str]) -> RevocationList {
        RevocationList { generation, serials: serials.iter().map(|serial| serial.parse().unwrap()).collect() }
    }

    #[test]
    fn a_list_is_read_back_and_invalid_ones_are_rejected() {
        let written = list(7, &["0a1b", "ff"]);
        assert_eq!(RevocationList::parse(written.to_json().as_bytes()), Ok(written));
        for (text, problem) in [
            ("", "is not a list"),
            ("[]", "is not a list"),
            (r#"{"version":1,"generation":1,"serials":["0"]}"#, "not a serial number"),
            (r#"{"version":1,"generation":1,"serials":["xx"]}"#, "not a serial number"),
            (r#"{"version":1,"generation":1,"serials":[""]}"#, "not a serial number"),
            (r#"{"version":1,"generation":-1,"serials":[]}"#, "is not a list"),
            (r#"{"version":2,"generation":1,"serials":[]}"#, "version 2"),
            (r#"{"version":1,"generation":1,"serials":[],"more":1}"#, "unknown field"),
        ] {
            let found = RevocationList::parse(text.as_bytes()).unwrap_err();
            assert!(found.contains(problem), "{text}: {found}");
        }
        let serials = vec!["01"; REVOKED_MAX + 1].join("\",\"");
        let text = format!("{{\"version\":1,\"generation\":1,\"serials\":[\"{serials}\"]}}");
        assert!(RevocationList::parse(text.as_bytes()).unwrap_err().contains("more than 65536"));
        assert_eq!("00ff".parse(), Ok(SerialNumber::of(&[255])));
    }

    #[tokio::test]
    async fn a_newer_list_closes_the_connections_of_its_certificates_only() {
        let revocations = Arc::new(Revocations::load("identity.revoked", None).unwrap());
        let admit = |serial: &str| revocations.admit(serial.parse().unwrap());
        let (first, second) = (admit("01").unwrap(), admit("02").unwrap());
        assert_eq!(revocations.accept(list(3, &["01"])), Some(1));
        first.revoked().await;
        assert!(first.is_revoked() && !second.is_revoked());
        assert!(admit("01").is_none());
        assert_eq!(revocations.accept(list(3, &["02"])), None, "the same generation");
        assert_eq!(revocations.accept(list(2, &["02"])), None, "an older generation");
        assert!(!second.is_revoked());
        drop((first, second));
        assert!(revocations.open.lock().connections.is_empty());
        assert_eq!(revocations.accept(list(4, &[])), Some(0));
        assert!(admit("01").is_some());
    }
}
