//! The part of `[scaling]` that is about a Kubernetes cluster.

use std::path::{Path, PathBuf};

use regions::DeploymentName;
use reqwest::Url;

use super::Problems;

/// Where a pod finds its API server, and by which token and authority.
const API: &str = "https://kubernetes.default.svc";
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// In a workload's name it stands for the deployment's.
const DEPLOYMENT: &str = "{deployment}";
/// The port of configs/replica.toml.
const PORT: u16 = 7200;

/// As written.
pub(super) struct RawKubernetes {
    pub(super) namespace: Option<String>,
    pub(super) workload: Option<String>,
    pub(super) name: Option<String>,
    pub(super) port: Option<u16>,
    pub(super) api: Option<String>,
    pub(super) token_file: Option<PathBuf>,
    pub(super) ca_file: Option<PathBuf>,
}

/// A cluster, and what is scaled in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesConfig {
    /// Of the workloads.
    pub namespace: String,
    /// What they are.
    pub kind: WorkloadKind,
    /// What they are called; see [`KubernetesConfig::workload_of`].
    pub name: String,
    /// Where a replica listens in its pod.
    pub port: u16,
    /// The API server.
    pub api: Url,
    /// By which the spoke shows who it is; read anew for each question.
    pub token_file: Option<PathBuf>,
    /// Who may speak for the API server; PEM.
    pub ca_file: Option<PathBuf>,
}

/// What replicas are pods of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkloadKind {
    /// Whose pods are alike; those that have been drained go first.
    Deployment,
    /// Whose pods are numbered; the highest goes first.
    StatefulSet,
}

impl WorkloadKind {
    /// As it stands in the API's paths, and in the file without its last letter.
    pub fn plural(self) -> &'static str {
        match self {
            WorkloadKind::Deployment => "deployments",
            WorkloadKind::StatefulSet => "statefulsets",
        }
    }
}

impl KubernetesConfig {
    /// The name of a deployment's workload. Kubernetes takes small letters, digits and `-`: others become these.
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
                let wanted = "write \"deployment\" or \"statefulset\"";
                self.note(format!("scaling.workload = \"{other}\" is not known; {wanted}"));
                None
            }
        };
        let name = name.unwrap_or_else(|| format!("replica-{DEPLOYMENT}"));
        if !name.contains(DEPLOYMENT) {
            let problem = "would be the same for every deployment";
            self.note(format!(
                "scaling.name = \"{name}\" {problem}; write {DEPLOYMENT} where its name shall stand"
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
                "scaling.api = \"{text}\" is no URL of an API server; write \"https://HOST:PORT\""
            ));
        }
        let api = api?;
        // In the clear there is nobody to show a token to.
        let account = |file: &str| (api.scheme() == "https").then(|| Path::new(ACCOUNT).join(file));
        let given = |file: Option<PathBuf>| file.map(|file| base.join(file));
        let token_file = given(token_file).or_else(|| account("token"));
        let ca_file = given(ca_file).or_else(|| account("ca.crt"));
        let port = port.unwrap_or(PORT);
        Some(KubernetesConfig { namespace: namespace?, kind: kind?, name, port, api, token_file, ca_file })
    }

    /// A name as Kubernetes takes it (RFC 1123).
    fn label(&mut self, key: &str, text: String) -> Option<String> {
        let letters = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let good = (1..=63).contains(&text.len()) && text.bytes().all(letters) && !text.starts_with('-');
        if !good {
            self.note(format!("scaling.{key} = \"{text}\" is no name; write 1 to 63 of a-z, 0-9 and -"));
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
    fn in_a_pod_everything_but_the_namespace_has_its_default() {
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
    fn what_cannot_be_is_refused_by_its_key() {
        let text = |text: &str| Some(text.to_owned());
        let cases = [
            (RawKubernetes { namespace: None, ..raw() }, "scaling.namespace is missing"),
            (RawKubernetes { namespace: text("Mine"), ..raw() }, "scaling.namespace = \"Mine\""),
            (RawKubernetes { namespace: Some("x".repeat(64)), ..raw() }, "write 1 to 63"),
            (RawKubernetes { workload: text("job"), ..raw() }, "\"deployment\" or \"statefulset\""),
            (RawKubernetes { name: text("replica"), ..raw() }, "write {deployment} where"),
            (RawKubernetes { api: text("kubernetes:443"), ..raw() }, "scaling.api = \"kubernetes:443\""),
            (RawKubernetes { api: text("https://host/path"), ..raw() }, "scaling.api"),
        ];
        for (raw, wanted) in cases {
            let problems = read(raw).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains(wanted), "{wanted}: {problems:?}");
        }
        assert!(read(RawKubernetes { namespace: Some("x".repeat(63)), ..raw() }).is_ok());
    }
}
