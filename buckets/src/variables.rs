//! Variables of an environment that configure clients.

use std::fmt;
use std::path::PathBuf;

/// Error of the settings of a bucket: its URL, its credentials, or the certificates of its server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BucketSettingsError(pub String);

/// Variables of an environment that configure clients: those that begin with `AWS_`, `GOOGLE_`, `AZURE_`, and `HOME`.
///
/// They are a value, so that a client does not depend on the environment of the process.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct BucketVariables(Vec<(String, String)>);

/// Prefixes of the variables.
const PREFIXES: [&str; 3] = ["AWS_", "GOOGLE_", "AZURE_"];
/// Further variables: the folder of credentials files, and managed identities of Azure.
const OTHERS: [&str; 3] = ["HOME", "IDENTITY_ENDPOINT", "SERVICE_ACCOUNT"];

impl BucketVariables {
    /// Returns the variables of this process.
    pub fn of_process() -> BucketVariables {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        std::env::vars_os().filter_map(text).collect()
    }

    /// Returns the value of a variable; none if it is empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str()).filter(|value| !value.is_empty())
    }

    /// Sets a variable.
    pub fn set(&mut self, name: &str, value: &str) {
        self.0.retain(|(known, _)| known != name);
        self.0.push((name.to_owned(), value.to_owned()));
    }

    /// Returns the variables with this prefix, in lower case, as the keys of `object_store` are written. Empty ones are
    /// not set.
    pub(crate) fn keys(&self, prefix: &str) -> impl Iterator<Item = (String, &str)> {
        let is_set = move |(name, value): &&(String, String)| name.starts_with(prefix) && !value.is_empty();
        let with_prefix = self.0.iter().filter(is_set);
        with_prefix.map(|(name, value)| (name.to_ascii_lowercase(), value.as_str()))
    }

    pub(crate) fn home(&self, path: &str) -> Option<PathBuf> {
        Some(PathBuf::from(self.get("HOME")?).join(path))
    }
}

impl FromIterator<(String, String)> for BucketVariables {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(variables: I) -> BucketVariables {
        let is_used =
            |name: &str| PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || OTHERS.contains(&name);
        BucketVariables(variables.into_iter().filter(|(name, _)| is_used(name)).collect())
    }
}

// Not derived: the values are secret.
impl fmt::Debug for BucketVariables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}
