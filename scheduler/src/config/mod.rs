//! Parsers of `hub.toml` and `spoke.toml`. Each file is read once and becomes a validated configuration, or a list of
//! all problems.

mod hub;
mod kubernetes;
mod scaling;
mod spoke;
mod store;

pub use hub::{HubConfig, LEASE_TTL};
pub use kubernetes::{KubernetesConfig, WorkloadKind};
pub use scaling::{ActuatorConfig, ProcessConfig, REPLICAS_MAX, ScalingConfig};
pub use spoke::{Receipts, SpokeConfig, TlsFiles};
pub use store::StoreConfig;

use regions::Catalogue;
use serde::de::DeserializeOwned;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Parses TOML; the error names the position.
fn raw<T: DeserializeOwned>(text: &str) -> Result<T, Vec<String>> {
    toml::from_str(text).map_err(|error: toml::de::Error| vec![error.to_string().trim_end().to_owned()])
}

/// Problems found so far.
#[derive(Default)]
struct Problems(Vec<String>);

impl Problems {
    fn note(&mut self, problem: impl Into<String>) {
        self.0.push(problem.into());
    }

    /// Returns the value of a required key.
    fn need<T>(&mut self, key: &str, value: Option<T>, example: &str) -> Option<T> {
        if value.is_none() {
            self.note(format!("{key} is missing; write {key} = {example}"));
        }
        value
    }

    fn address(&mut self, key: &str, value: Option<String>) -> Option<SocketAddr> {
        let value = self.need(key, value, "\"IP:PORT\"")?;
        let address = value.parse().ok();
        if address.is_none() {
            self.note(format!(
                "{key} = \"{value}\" is not an address; write \"IP:PORT\", such as \"127.0.0.1:7000\""
            ));
        }
        address
    }

    /// Parses an address at which other machines can reach this process.
    fn reachable(&mut self, key: &str, value: Option<String>) -> Option<SocketAddr> {
        let address = self.address(key, value)?;
        if address.port() == 0 || address.ip().is_unspecified() || address.ip().is_multicast() {
            self.note(format!(
                "{key} = \"{address}\" is unreachable for other processes; write an address that they can connect to, such as \
                 \"10.0.0.7:7100\""
            ));
            return None;
        }
        Some(address)
    }

    fn file(&mut self, key: &str, path: &Path) -> Option<String> {
        let text = std::fs::read_to_string(path);
        text.map_err(|error| self.note(format!("{key} = \"{}\" cannot be read: {error}", path.display())))
            .ok()
    }

    /// Reads a secret from `NAME_file` or `NAME_env`, of which at most one may be set.
    fn token<T>(
        &mut self,
        name: &str,
        file: Option<PathBuf>,
        variable: Option<String>,
        base: &Path,
        read: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        let (source, text) = match (file, variable) {
            (None, None) => return None,
            (Some(_), Some(_)) => {
                self.note(format!("{name}_file and {name}_env are both set; set one of them"));
                return None;
            }
            (Some(path), None) => {
                let path = base.join(path);
                let text = self.file(&format!("{name}_file"), &path)?;
                (format!("{name}_file = \"{}\"", path.display()), text)
            }
            (None, Some(variable)) => {
                let source = format!("{name}_env = \"{variable}\"");
                let Ok(text) = std::env::var(&variable) else {
                    self.note(format!("{source} is not set in the environment"));
                    return None;
                };
                (source, text)
            }
        };
        read(&text).map_err(|problem| self.note(format!("{source} {problem}"))).ok()
    }

    /// Reads the catalogue from this file; without a file, returns the built-in one.
    fn catalogue(&mut self, path: Option<PathBuf>, base: &Path) -> Option<Catalogue> {
        let Some(path) = path.map(|path| base.join(path)) else {
            return Some(Catalogue::builtin());
        };
        let text = self.file("catalogue", &path)?;
        let parsed = Catalogue::parse(&text);
        parsed.map_err(|found| self.in_file(&path, &found)).ok()
    }

    fn in_file(&mut self, path: &Path, found: &[regions::Problem]) {
        self.0.extend(found.iter().map(|problem| format!("{}: {problem}", path.display())));
    }
}
