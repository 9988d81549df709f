//! `[scaling]` of `spoke.toml` with `actuator = "kubernetes"`.

use std::path::{Path, PathBuf};

use regions::DeploymentName;
use reqwest::Url;

use super::Problems;

/// In-cluster address of the API server, and the folder of the pod's token and CA certificate.
const API: &str = "https://kubernetes.default.svc";
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Placeholder of the deployment in the name of a workload.
const DEPLOYMENT: &str = "{deployment}";
/// The default port of configs/replica.toml.
const PORT: u16 = 7200;

/// Keys of the actuator, as parsed.
pub(super) struct RawKubernetes {
    pub(super) namespace: Option<String>,
    pub(super) workload: Option<String>,
    pub(super) name: Option<String>,
    pub(super) port: Option<u16>,
    pub(super) api: Option<String>,
    pub(super) token_file: Option<PathBuf>,
    pub(super) ca_file: Option<PathBuf>,
}

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

/// Kind of the workloads whose pods are replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkloadKind {
    /// Pods are interchangeable; drained ones are deleted first.
    Deployment,
    /// Pods are numbered; the highest number is deleted first.
    StatefulSet,
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

impl Problems {
    pub(super) fn kubernetes(&mut self, raw: RawKubernetes, base: &Path) -> Option<KubernetesConfig> {
        let RawKubernetes { namespace, workload, name, port, api, token_file, ca_file } = raw;
        let namespace = self.need("scaling.namespace", namespace, "\"meridian\"");
        let namespace = namespace.and_then(|text| self.label("namespace", text));
        let kind = match workload.as_deref() {
            None | Some("deployment") => Some(WorkloadKind::Deployment),
            Some("statefulset") => Some(WorkloadKind::StatefulSet),
            Some(other) => {
                let expected = "write \"deployment\" or \"statefulset\"";
                self.note(format!("scaling.workload = \"{other}\" is unknown; {expected}"));
                None
            }
        };
        let name = name.unwrap_or_else(|| format!("replica-{DEPLOYMENT}"));
        if !name.contains(DEPLOYMENT) {
            let problem = "is the same for every deployment";
            self.note(format!(
                "scaling.name = \"{name}\" {problem}; write {DEPLOYMENT} in place of the deployment's name"
            ));
        }
        let text = api.unwrap_or_else(|| API.to_owned());
        let api = Url::parse(&text).ok().filter(|url| {
            matches!(url.scheme(), "http" | "https")
                && url.has_host()
                && url.path() == "/"
                && url.query().is_none()
        });
        if api.is_none() {
            self.note(format!(
                "scaling.api = \"{text}\" is not the URL of an API server; write \"https://HOST:PORT\""
            ));
        }
        let api = api?;
        // No token is sent without TLS.
        let account = |file: &str| (api.scheme() == "https").then(|| Path::new(ACCOUNT).join(file));
        let given = |file: Option<PathBuf>| file.map(|file| base.join(file));
        let token_file = given(token_file).or_else(|| account("token"));
        let ca_file = given(ca_file).or_else(|| account("ca.crt"));
        let port = port.unwrap_or(PORT);
        Some(KubernetesConfig { namespace: namespace?, kind: kind?, name, port, api, token_file, ca_file })
    }

    /// Validates a name by the rules of Kubernetes (RFC 1123).
    fn label(&mut self, key: &str, text: String) -> Option<String> {
        let letters = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let good = (1..=63).contains(&text.len()) && text.bytes().all(letters) && !text.starts_with('-');
        if !good {
            self.note(format!(
                "scaling.{key} = \"{text}\" is not a valid name; write 1 to 63 of a-z, 0-9 and -"
            ));
        }
        good.then_some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw() -> RawKubernetes {
        let namespace = Some("meridian".to_owned());
        RawKubernetes {
            namespace,
            workload: None,
            name: None,
            port: None,
            api: None,
            token_file: None,
            ca_file: None,
        }
    }

    fn read(raw: RawKubernetes) -> Result<KubernetesConfig, Vec<String>> {
        let mut problems = Problems::default();
        let read = problems.kubernetes(raw, Path::new("/etc/meridian"));
        read.filter(|_| problems.0.is_empty()).ok_or(problems.0)
    }

    #[test]
    fn all_keys_but_the_namespace_have_defaults() {
        let config = read(raw()).unwrap();
        assert_eq!((config.kind, config.port), (WorkloadKind::Deployment, 7200));
        assert_eq!(config.api.as_str(), "https://kubernetes.default.svc/");
        let [token, ca] = [config.token_file.clone(), config.ca_file.clone()].map(Option::unwrap);
        assert!(token.ends_with("serviceaccount/token") && ca.ends_with("serviceaccount/ca.crt"));
        assert_eq!(config.workload_of(&"Docs_embed.v2".parse().unwrap()), "replica-docs-embed-v2");
        let clear = read(RawKubernetes { api: Some("http://127.0.0.1:8001".to_owned()), ..raw() }).unwrap();
        assert_eq!((clear.token_file, clear.ca_file), (None, None));
    }

    #[test]
    fn invalid_values_are_rejected_by_key() {
        let text = |text: &str| Some(text.to_owned());
        let cases = [
            (RawKubernetes { namespace: None, ..raw() }, "scaling.namespace is missing"),
            (RawKubernetes { namespace: text("Mine"), ..raw() }, "scaling.namespace = \"Mine\""),
            (RawKubernetes { namespace: Some("x".repeat(64)), ..raw() }, "write 1 to 63"),
            (RawKubernetes { workload: text("job"), ..raw() }, "\"deployment\" or \"statefulset\""),
            (RawKubernetes { name: text("replica"), ..raw() }, "write {deployment} in place"),
            (RawKubernetes { api: text("kubernetes:443"), ..raw() }, "scaling.api = \"kubernetes:443\""),
            (RawKubernetes { api: text("https://host/path"), ..raw() }, "scaling.api"),
        ];
        for (raw, expected) in cases {
            let problems = read(raw).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains(expected), "{expected}: {problems:?}");
        }
        assert!(read(RawKubernetes { namespace: Some("x".repeat(63)), ..raw() }).is_ok());
    }
}
