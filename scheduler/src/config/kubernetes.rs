//! `[scaling]` of `spoke.toml` with `actuator = "kubernetes"`.

use std::path::{Path, PathBuf};

use configuration::words;
use regions::DeploymentName;
use reqwest::Url;

/// In-cluster address of the API server, and the folder of the pod's token and CA certificate.
pub(super) const API: &str = "https://kubernetes.default.svc";
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Placeholder of the deployment in the name of a workload.
pub(super) const DEPLOYMENT: &str = "{deployment}";
/// The default port of configs/replica.toml.
pub(super) const PORT: u16 = 7200;

/// A cluster and its workloads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesConfig {
    /// Namespace of the workloads.
    pub namespace: String,
    /// Kind of the workloads.
    pub kind: WorkloadKind,
    /// Name pattern of the workloads; see [`KubernetesConfig::workload_of`].
    pub name: String,
    /// Port of a replica in its pod.
    pub port: u16,
    /// URL of the API server.
    pub api: Url,
    /// File with the bearer token; read again for each request.
    pub token_file: Option<PathBuf>,
    /// File with the CA certificate of the API server; PEM.
    pub ca_file: Option<PathBuf>,
}

words! {
    /// Kind of the workloads whose pods are replicas.
    pub enum WorkloadKind {
        /// Pods are interchangeable; drained ones are deleted first.
        Deployment = "deployment",
        /// Pods are numbered; the highest number is deleted first.
        StatefulSet = "statefulset",
    }
}

impl WorkloadKind {
    /// Returns the name in API paths; the configuration file has it without the last letter.
    pub fn plural(self) -> &'static str {
        match self {
            WorkloadKind::Deployment => "deployments",
            WorkloadKind::StatefulSet => "statefulsets",
        }
    }
}

impl KubernetesConfig {
    /// Returns the name of a deployment's workload. Kubernetes allows lower-case letters, digits and `-`; `_` and `.`
    /// become `-`.
    pub fn workload_of(&self, deployment: &DeploymentName) -> String {
        let lower = deployment.as_str().to_ascii_lowercase().replace(['_', '.'], "-");
        self.name.replace(DEPLOYMENT, &lower)
    }
}

/// Validates a name by the rules of Kubernetes (RFC 1123).
pub(super) fn is_label(text: &str) -> Result<(), String> {
    let letters = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let good = (1..=63).contains(&text.len()) && text.bytes().all(letters) && !text.starts_with('-');
    if good { Ok(()) } else { Err("is not a valid name; write 1 to 63 of a-z, 0-9 and -".to_owned()) }
}

/// Validates the pattern of the workloads' names.
pub(super) fn is_pattern(text: &str) -> Result<(), String> {
    let problem = "is the same for every deployment";
    if text.contains(DEPLOYMENT) {
        Ok(())
    } else {
        Err(format!("{problem}; write {DEPLOYMENT} in place of the deployment's name"))
    }
}

/// Validates the URL of the API server.
pub(super) fn is_api(text: &str) -> Result<(), String> {
    api(text)
        .map(drop)
        .ok_or_else(|| "is not the URL of an API server; write \"https://HOST:PORT\"".to_owned())
}

/// Parses the URL of the API server.
pub(super) fn api(text: &str) -> Option<Url> {
    Url::parse(text).ok().filter(|url| {
        matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.path() == "/"
            && url.query().is_none()
    })
}

/// Returns a file of the pod's service account.
pub(super) fn account(file: &str) -> PathBuf {
    Path::new(ACCOUNT).join(file)
}

#[cfg(test)]
mod tests {
    use super::super::scaling::ScalingSection;
    use super::*;
    use configuration::{ConfigFile, Files, section};

    const NAMESPACE: &str = "namespace = \"meridian\"\n";

    fn read(keys: &str) -> Result<KubernetesConfig, Vec<String>> {
        section! {
            /// File with the section.
            struct File {
                /// Section.
                scaling: ScalingSection;
            }
        }
        let files = Files { base: Path::new("/etc/meridian"), environment: None };
        let read = ConfigFile::read(
            &format!("[scaling]\ndir = \"x\"\nactuator = \"kubernetes\"\n{keys}"),
            |document| document.section::<File>()?.scaling.kubernetes(document, &files),
        );
        read.map_err(|found| found.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn all_keys_but_the_namespace_have_defaults() {
        let config = read(NAMESPACE).unwrap();
        assert_eq!((config.kind, config.port), (WorkloadKind::Deployment, 7200));
        assert_eq!(config.api.as_str(), "https://kubernetes.default.svc/");
        let [token, ca] = [config.token_file.clone(), config.ca_file.clone()].map(Option::unwrap);
        assert!(token.ends_with("serviceaccount/token") && ca.ends_with("serviceaccount/ca.crt"));
        assert_eq!(config.workload_of(&"Docs_embed.v2".parse().unwrap()), "replica-docs-embed-v2");
        let clear = read(&format!("{NAMESPACE}api = \"http://127.0.0.1:8001\"")).unwrap();
        assert_eq!((clear.token_file, clear.ca_file), (None, None));
    }

    #[test]
    fn invalid_values_are_rejected_by_key() {
        let long = |length: usize| format!("namespace = \"{}\"", "x".repeat(length));
        let with = |key: &str| format!("{NAMESPACE}{key}");
        let cases = [
            (String::new(), "scaling.namespace: is missing"),
            ("namespace = \"Mine\"".to_owned(), "scaling.namespace: \"Mine\" is not a valid name"),
            (long(64), "write 1 to 63"),
            (with("workload = \"job\""), "\"deployment\" or \"statefulset\""),
            (with("name = \"replica\""), "write {deployment} in place"),
            (with("api = \"kubernetes:443\""), "scaling.api: \"kubernetes:443\""),
            (with("api = \"https://host/path\""), "scaling.api"),
        ];
        for (keys, expected) in cases {
            let problems = read(&keys).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains(expected), "{expected}: {problems:?}");
        }
        assert!(read(&long(63)).is_ok());
    }
}
