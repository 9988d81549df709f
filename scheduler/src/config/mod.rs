//! `hub.toml` and `spoke.toml`, read once: what a person writes becomes what the roles can rely on, or a list of
//! everything that is wrong.

mod hub;
mod kubernetes;
mod scaling;
mod spoke;
mod store;

pub use hub::{HubConfig, LEASE_TTL};
pub use kubernetes::{KubernetesConfig, WorkloadKind};
pub use scaling::{ActuatorConfig, ProcessConfig, ScalingConfig};
pub use spoke::{REPLICAS_MAX, Receipts, SpokeConfig, TlsFiles};
pub use store::StoreConfig;

use regions::Catalogue;
use serde::de::DeserializeOwned;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The file as it stands, or what is wrong with its form.
fn raw<T: DeserializeOwned>(text: &str) -> Result<T, Vec<String>> {
    toml::from_str(text).map_err(|error: toml::de::Error| vec![error.to_string().trim_end().to_owned()])
}

/// What is wrong so far.
#[derive(Default)]
struct Problems(Vec<String>);

impl Problems {
    fn note(&mut self, problem: impl Into<String>) {
        self.0.push(problem.into());
    }

    /// The value of a key that must be there.
    fn need<T>(&mut self, key: &str, value: Option<T>, wanted: &str) -> Option<T> {
        if value.is_none() {
            self.note(format!("{key} is missing; write {key} = {wanted}"));
        }
        value
    }

    fn address(&mut self, key: &str, value: Option<String>) -> Option<SocketAddr> {
        let value = self.need(key, value, "\"IP:PORT\"")?;
        let address = value.parse().ok();
        if address.is_none() {
            self.note(format!("{key} = \"{value}\" is no address; write \"IP:PORT\", as \"127.0.0.1:7000\""));
        }
        address
    }

    /// An address at which somebody else can reach this process.
    fn reachable(&mut self, key: &str, value: Option<String>) -> Option<SocketAddr> {
        let address = self.address(key, value)?;
        if address.port() == 0 || address.ip().is_unspecified() || address.ip().is_multicast() {
            self.note(format!(
                "{key} = \"{address}\" cannot be reached by others; write an address that they can connect to, as \
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

    /// What a secret of this name says, from the one place that is named: `NAME_file` or `NAME_env`.
    fn token<T>(
        &mut self,
        name: &str,
        file: Option<PathBuf>,
        variable: Option<String>,
        base: &Path,
        read: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        let (what, text) = match (file, variable) {
            (None, None) => return None,
            (Some(_), Some(_)) => {
                self.note(format!("{name}_file and {name}_env are both there; write one of them"));
                return None;
            }
            (Some(path), None) => {
                let path = base.join(path);
                let text = self.file(&format!("{name}_file"), &path)?;
                (format!("{name}_file = \"{}\"", path.display()), text)
            }
            (None, Some(variable)) => {
                let what = format!("{name}_env = \"{variable}\"");
                let Ok(text) = std::env::var(&variable) else {
                    self.note(format!("{what} is not set in the environment"));
                    return None;
                };
                (what, text)
            }
        };
        read(&text).map_err(|problem| self.note(format!("{what} {problem}"))).ok()
    }

    /// The catalogue in this file, or the built-in one.
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
