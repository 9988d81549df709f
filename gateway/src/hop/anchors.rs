//! The authorities that may name the other end: certificates in one PEM file that may change at any time.
//!
//! To exchange an authority without a gap, the file holds the old one and the new one for as long as certificates of both
//! are in use. Connections that are open stay; those that are opened, also with a ticket, are asked of the new list.

use crate::tls::certificates;
use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, ring};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use supervision::RwLock;

/// How often the file is looked at.
const LOOK_PERIOD: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Anchors {
    /// How the configuration calls the file.
    name: String,
    file: PathBuf,
    provider: Arc<CryptoProvider>,
    current: RwLock<Current>,
}

#[derive(Clone, Debug)]
pub(super) struct Current {
    text: Arc<[u8]>,
    pub(super) roots: Arc<RootCertStore>,
    /// The same, for whoever is a client.
    pub(super) of_clients: Arc<dyn ClientCertVerifier>,
}

impl Anchors {
    /// Reads the file, which `table.key` names.
    pub(super) fn load(table: &str, key: &str, file: PathBuf) -> Result<Anchors, String> {
        let (name, provider) = (format!("{table}.{key}"), Arc::new(ring::default_provider()));
        let text = std::fs::read(&file)
            .map_err(|error| format!("{name} = \"{}\" cannot be read: {error}", file.display()))?;
        let current = believed(text, &provider)
            .map_err(|problem| format!("{name} = \"{}\" {problem}", file.display()))?;
        Ok(Anchors { name, file, provider, current: RwLock::independent(current) })
    }

    pub(super) fn current(&self) -> Current {
        self.current.read().clone()
    }

    pub(super) fn provider(&self) -> &Arc<CryptoProvider> {
        &self.provider
    }

    /// Follows the file for ever.
    pub(super) async fn follow(self: Arc<Anchors>) {
        let mut look = tokio::time::interval(LOOK_PERIOD);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut refused = None;
        loop {
            look.tick().await;
            let anchors = self.clone();
            let looked = tokio::task::spawn_blocking(move || anchors.look()).await;
            match looked.expect("looking at a file does not panic") {
                Ok(changed) => {
                    refused = None;
                    if changed {
                        tracing::info!(key = self.name, "new authorities are believed");
                    }
                }
                Err(problem) if refused.as_ref() != Some(&problem) => {
                    tracing::error!(key = self.name, problem, "the old authorities stay in use");
                    refused = Some(problem);
                }
                Err(_) => {}
            }
        }
    }

    fn look(&self) -> Result<bool, String> {
        let text = std::fs::read(&self.file).map_err(|error| format!("cannot be read: {error}"))?;
        if *self.current().text == *text {
            return Ok(false);
        }
        let current = believed(text, &self.provider)?;
        *self.current.write() = current;
        Ok(true)
    }
}

fn believed(text: Vec<u8>, provider: &Arc<CryptoProvider>) -> Result<Current, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&text)? {
        roots.add(certificate).map_err(|error| format!("has a certificate that is no authority: {error}"))?;
    }
    let roots = Arc::new(roots);
    let of_clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
        .build()
        .map_err(|error| format!("cannot be believed: {error}"))?;
    Ok(Current { text: text.into(), roots, of_clients })
}
