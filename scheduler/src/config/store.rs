//! `[store]` of `hub.toml`: where the hub stores its state.

use std::path::PathBuf;
use std::time::Duration;

use configuration::{ConfigFile, Files, section, words};
use scheduler_core::hubs::is_loopback;
use scheduler_store::{EtcdConfig, EtcdTls, EtcdTlsError, EtcdUser, KEEP_ALIVE};

/// Default prefix of a hub's keys in etcd.
const PREFIX: &str = "meridian/";
/// Lower bound of the keep-alive interval; shorter ones would cost more than a connection that hangs for that long.
const KEEP_ALIVE_MS_MIN: u64 = 100;
/// Maximum number of etcd members. More than seven are slower and not safer (etcd's FAQ), and a few may be joining or
/// leaving.
const ENDPOINTS_MAX: usize = 16;

words! {
    /// Kind of store.
    pub(super) enum HubStoreKind {
        /// File of its own, for a single hub.
        Embedded = "embedded",
        /// An etcd, for one or several hubs.
        Etcd = "etcd",
    }
}

section! {
    /// Store of the hub. The keys besides `kind` are for etcd.
    pub(super) partial struct StoreSection {
        /// Embedded in the directory `data`, for a single hub, or an etcd, for one or several.
        kind: HubStoreKind, like "\"embedded\" or \"etcd\"";
        /// Members of the etcd, `http://HOST:PORT` or `https://HOST:PORT`; required with etcd.
        endpoints: Option<Vec<String>>, in 1..=ENDPOINTS_MAX, check is_endpoint;
        /// Prefix of all keys, so that one etcd can serve several fleets.
        prefix: String = PREFIX.to_owned(), check is_prefix;
        /// Keep-alive interval of a connection in milliseconds.
        keep_alive_ms: u64 = KEEP_ALIVE.as_millis() as u64, in KEEP_ALIVE_MS_MIN.., fix "that the members' --grpc-keepalive-min-time allows";
        /// User, with a password.
        user: Option<String>;
        /// File with the password.
        password_file: Option<PathBuf>;
        /// Environment variable with the password, instead of the file.
        password_env: Option<String>;
        /// Certificates of the authority that signs the members' certificates; PEM; required with https.
        ca: Option<PathBuf>;
        /// Client certificate; PEM; required for members on other machines.
        certificate: Option<PathBuf>;
        /// Private key of that certificate; PEM.
        key: Option<PathBuf>;
        /// Permits members on other machines in plaintext, or without a client certificate.
        insecure: bool = false;
    }
}

fn is_endpoint(endpoint: &str) -> Result<(), String> {
    let rest = endpoint.strip_prefix("http://").or_else(|| endpoint.strip_prefix("https://"));
    let address = rest.and_then(|rest| rest.rsplit_once(':'));
    let plain = |host: &str| !host.is_empty() && !host.contains(['/', '@', '?', '#', ' ']);
    let is_valid =
        address.is_some_and(|(host, port)| plain(host) && port.parse::<u16>().is_ok_and(|port| port > 0));
    let fix = "write \"http://HOST:PORT\" or \"https://HOST:PORT\"";
    if is_valid { Ok(()) } else { Err(format!("is not the URL of an etcd member; {fix}")) }
}

fn is_prefix(prefix: &str) -> Result<(), String> {
    let problem = "is empty; write the prefix of all keys, such as \"meridian/\"";
    if prefix.is_empty() { Err(problem.to_owned()) } else { Ok(()) }
}

/// Where the hub stores its state.
#[derive(Clone, Debug)]
pub enum StoreConfig {
    /// A file of its own, for a single hub.
    Embedded {
        /// The folder of the file.
        data: PathBuf,
    },
    /// An etcd, for one or several hubs.
    Etcd(EtcdConfig),
}

/// Validates `[store]` and `data`.
pub(super) fn read(
    document: &ConfigFile<'_>,
    files: &Files<'_>,
    section: Option<Option<StoreSection>>,
    data: Option<Option<PathBuf>>,
) -> Option<StoreConfig> {
    let section = section?;
    match section.as_ref().map_or(Some(HubStoreKind::Embedded), |section| section.kind)? {
        HubStoreKind::Embedded => {
            let keys = [
                "endpoints",
                "prefix",
                "keep_alive_ms",
                "user",
                "password_file",
                "password_env",
                "ca",
                "certificate",
                "key",
                "insecure",
            ];
            document.without_effect("store", &keys, "with kind = \"embedded\"");
            let data = data?;
            if data.is_none() {
                document
                    .problem("data", "is missing; write data = \"FOLDER\", where the hub stores its state");
            }
            Some(StoreConfig::Embedded { data: files.path(data?) })
        }
        HubStoreKind::Etcd => {
            if document.has("data") {
                let problem =
                    "has no effect with store.kind = \"etcd\", which stores the hub's state; remove it";
                document.problem("data", problem);
            }
            section?.etcd(document, files).map(StoreConfig::Etcd)
        }
    }
}

impl StoreSection {
    fn etcd(self, document: &ConfigFile<'_>, files: &Files<'_>) -> Option<EtcdConfig> {
        let StoreSection { kind: _, endpoints, prefix, keep_alive_ms, .. } = &self;
        if let Some(None) = endpoints {
            let example = "store.endpoints = [\"https://10.0.0.1:2379\", …], the members of the etcd";
            document.problem("store.endpoints", format!("is missing; write {example}"));
        }
        let endpoints = endpoints.clone().flatten();
        let user = self.user(document, files);
        let pem = |key: &str, path: &Option<Option<PathBuf>>| {
            let path = path.as_ref()?.as_ref()?;
            files.text(document, &format!("store.{key}"), path).map(String::into_bytes)
        };
        let ca = pem("ca", &self.ca);
        let identity = pem("certificate", &self.certificate).zip(pem("key", &self.key));
        let [has_ca, has_certificate, has_key] =
            ["ca", "certificate", "key"].map(|key| document.has(&format!("store.{key}")));
        if has_certificate != has_key {
            let problem = "and store.certificate belong together; set both or neither";
            document.problem("store.key", problem);
        }
        if (has_certificate || has_key) && !has_ca {
            let key = if has_key { "store.key" } else { "store.certificate" };
            document.problem(key, "is for https:// endpoints, and requires store.ca; write it");
        }
        if let Some(endpoints) = &endpoints {
            let of = |scheme: &str| endpoints.iter().any(|endpoint| endpoint.starts_with(scheme));
            let (http, https) = (of("http://"), of("https://"));
            if http && https {
                document.problem("store.endpoints", "mixes http:// and https://; use one of them for all");
            }
            match (https, has_ca) {
                (true, false) => document.problem(
                    "store.ca",
                    "is missing; write the file with the CA certificate that signs the members' certificates",
                ),
                (false, true) => {
                    document.problem("store.ca", "is for https:// endpoints, and there are none; remove it");
                }
                (true, true) | (false, false) => {}
            }
            if self.insecure == Some(false) {
                self.check_remote(document, endpoints, has_certificate || has_key);
            }
        }
        let tls = ca.and_then(|authority| {
            let pair = identity.as_ref().map(|(certificate, key)| (certificate.as_slice(), key.as_slice()));
            let unusable = |error: EtcdTlsError| {
                let (key, file) = match &error {
                    EtcdTlsError::Authority(_) => ("store.ca", &self.ca),
                    EtcdTlsError::Certificate(_) => ("store.certificate", &self.certificate),
                    EtcdTlsError::Key(_) => ("store.key", &self.key),
                };
                let file = file.iter().flatten().map(|file| format!("\"{}\" ", file.display()));
                document.problem(key, format!("{}{error}", file.collect::<String>()));
            };
            EtcdTls::new(&authority, pair).map_err(unusable).ok()
        });
        Some(EtcdConfig {
            endpoints: endpoints?,
            prefix: prefix.clone()?,
            keep_alive: Duration::from_millis((*keep_alive_ms)?),
            user,
            tls,
        })
    }

    /// Reports members on other machines that are not used with mutual TLS.
    fn check_remote(&self, document: &ConfigFile<'_>, endpoints: &[String], has_certificate: bool) {
        let first_remote = |scheme: &str| {
            let address = |endpoint: &&String| endpoint.strip_prefix(scheme).map(|at| !is_loopback(at));
            endpoints.iter().find(|endpoint| address(endpoint) == Some(true))
        };
        if let Some(endpoint) = first_remote("http://") {
            let problem = format!(
                "\"{endpoint}\" uses plaintext and is not a loopback address; write https:// with ca, certificate and \
                 key, or set store.insecure = true"
            );
            document.problem("store.endpoints", problem);
        }
        if let Some(endpoint) = first_remote("https://")
            && !has_certificate
        {
            let problem = format!(
                "is missing, and \"{endpoint}\" is on another machine; write the client certificate for etcd with its \
                 key, or set store.insecure = true"
            );
            document.problem("store.certificate", problem);
        }
    }

    fn user(&self, document: &ConfigFile<'_>, files: &Files<'_>) -> Option<EtcdUser> {
        let (file, variable) =
            (self.password_file.as_ref()?.as_deref(), self.password_env.as_ref()?.as_deref());
        let name = self.user.as_ref()?.as_ref();
        match name {
            Some(name) if file.is_none() && variable.is_none() => {
                let problem = format!("\"{name}\" has no password; set password_file or password_env");
                document.problem("store.user", problem);
            }
            None if file.is_some() || variable.is_some() => {
                let problem = "is missing; write the name of the user with this password";
                document.problem("store.user", problem);
            }
            Some(_) | None => {}
        }
        let password =
            files.secret(document, "store.password", file, variable, |text| Ok(text.trim().to_owned()));
        Some(EtcdUser { name: name?.clone(), password: password? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn parse(text: &str, base: &Path) -> Result<StoreConfig, Vec<String>> {
        section! {
            /// File with the section.
            struct File {
                /// Section.
                store: StoreSection;
            }
        }
        let environment = configuration::Environment::default();
        let files = Files { base, environment: Some(&environment) };
        let store = ConfigFile::read(&format!("[store]\n{text}"), |document| {
            read(document, &files, Some(Some(document.section::<File>()?.store)), Some(None))
        });
        store.map_err(|found| found.iter().map(ToString::to_string).collect())
    }

    /// Writes `ca.crt`, and `hub.crt` with `hub.key`, which it has signed.
    fn write_pems(base: &Path) {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let (ca_key, key) = (rcgen::KeyPair::generate().unwrap(), rcgen::KeyPair::generate().unwrap());
        let write = |name: &str, text: String| std::fs::write(base.join(name), text).unwrap();
        write("ca.crt", params.self_signed(&ca_key).unwrap().pem());
        let issuer = rcgen::Issuer::new(params, ca_key);
        let own = rcgen::CertificateParams::new(vec!["hub".to_owned()]).unwrap();
        write("hub.crt", own.signed_by(&key, &issuer).unwrap().pem());
        write("hub.key", key.serialize_pem());
    }

    #[test]
    fn an_etcd_on_another_machine_needs_mutual_tls_unless_the_file_says_insecure() {
        let base = tempfile::tempdir().unwrap();
        write_pems(base.path());
        let with = |endpoint: &str, rest: &str| {
            let text =
                format!("kind = \"etcd\"\nendpoints = [\"http://127.0.0.1:1\", \"{endpoint}\"]\n{rest}");
            let text = if endpoint.starts_with("https") {
                text.replace("http://127.0.0.1:1", "https://127.0.0.1:1")
            } else {
                text
            };
            parse(&text, base.path()).map(drop)
        };
        let (ca, pair) = ("ca = \"ca.crt\"\n", "certificate = \"hub.crt\"\nkey = \"hub.key\"\n");
        for endpoint in ["http://10.0.0.1:2379", "http://etcd:2379", "http://[2001:db8::1]:2379"] {
            let problems = with(endpoint, "").unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains("store.endpoints"), "{problems:?}");
            assert!(problems[0].contains(endpoint) && problems[0].contains("store.insecure = true"));
            assert_eq!(with(endpoint, "insecure = true\n"), Ok(()));
        }
        for endpoint in ["http://[::1]:2379", "http://localhost:2379"] {
            assert_eq!(with(endpoint, ""), Ok(()), "{endpoint}");
        }
        let problems = with("https://etcd:2379", ca).unwrap_err();
        assert!(problems.len() == 1 && problems[0].contains("store.certificate: is missing"), "{problems:?}");
        assert_eq!(with("https://etcd:2379", &format!("{ca}{pair}")), Ok(()));
        assert_eq!(with("https://etcd:2379", &format!("{ca}insecure = true\n")), Ok(()));
        assert_eq!(with("https://[::1]:2379", ca), Ok(()), "on this machine");
        let swapped = format!("{ca}certificate = \"hub.key\"\nkey = \"hub.crt\"\n");
        let problems = with("https://etcd:2379", &swapped).unwrap_err();
        assert!(
            problems.len() == 1 && problems[0].contains("store.certificate: \"hub.key\" has"),
            "{problems:?}"
        );
        let embedded = parse("kind = \"embedded\"\ninsecure = true", base.path()).unwrap_err();
        assert!(
            embedded.iter().any(|problem| problem.contains("store.insecure: has no effect")),
            "{embedded:?}"
        );
    }

    #[test]
    fn all_keys_of_an_etcd_are_parsed() {
        let base = tempfile::tempdir().unwrap();
        write_pems(base.path());
        std::fs::write(base.path().join("password"), "secret\n").unwrap();
        let text = "kind = \"etcd\"\nendpoints = [\"https://a:2379\", \"https://[::1]:2379\"]\nprefix = \"x/\"\n\
                    keep_alive_ms = 100\nuser = \"hub\"\npassword_file = \"password\"\nca = \"ca.crt\"\n\
                    certificate = \"hub.crt\"\nkey = \"hub.key\"\n";
        let Ok(StoreConfig::Etcd(etcd)) = parse(text, base.path()) else {
            panic!("{:?}", parse(text, base.path()))
        };
        assert_eq!((etcd.endpoints.len(), etcd.prefix.as_str()), (2, "x/"));
        assert_eq!(etcd.keep_alive, Duration::from_millis(KEEP_ALIVE_MS_MIN));
        assert_eq!(etcd.user.as_ref().map(|user| user.password.as_str()), Some("secret"));
        assert!(etcd.tls.is_some());
        assert!(!format!("{etcd:?}").contains("secret"), "a password must not appear in logs");

        let Ok(StoreConfig::Etcd(etcd)) =
            parse("kind = \"etcd\"\nendpoints = [\"http://localhost:1\"]\n", base.path())
        else {
            panic!("the other keys are optional")
        };
        assert_eq!((etcd.prefix.as_str(), etcd.keep_alive), (PREFIX, KEEP_ALIVE));
    }

    #[test]
    fn all_problems_are_reported_together() {
        let check = |text: &str, expected: &[&str]| {
            let problems = parse(text, Path::new("/nowhere")).expect_err(text);
            assert_eq!(problems.len(), expected.len(), "{problems:#?}");
            for (problem, part) in problems.iter().zip(expected) {
                assert!(problem.contains(part), "{part} in {problem}");
            }
        };
        check("", &["store.kind: is missing"]);
        check("kind = \"etdc\"", &["\"etdc\" is unknown"]);
        check(
            "kind = \"embedded\"\nprefix = \"a\"\nuser = \"a\"",
            &[
                "data: is missing",
                "store.prefix: has no effect with kind = \"embedded\"",
                "store.user: has no effect",
            ],
        );
        check("kind = \"embedded\"", &["data: is missing"]);
        check("kind = \"etcd\"", &["store.endpoints: is missing"]);
        check("kind = \"etcd\"\nendpoints = []", &["has 0"]);
        let many = vec!["http://127.0.0.1:1"; ENDPOINTS_MAX + 1];
        check(&format!("kind = \"etcd\"\nendpoints = {many:?}"), &["has 17"]);
        check(
            "kind = \"etcd\"\nendpoints = [\"a:1\", \"http://a\", \"http://a:0\", \"http://a/b:1\"]\nprefix = \"\"\n\
             keep_alive_ms = 99\nuser = \"hub\"\nkey = \"none.key\"",
            &[
                "\"a:1\"",
                "\"http://a\"",
                "\"http://a/b:1\"",
                "\"http://a:0\"",
                "store.prefix",
                "99 is out of range; write a whole number, 100 or more",
                "has no password",
                "none.key",
                "belong together",
                "requires store.ca",
            ],
        );
        check(
            "kind = \"etcd\"\nendpoints = [\"http://[::1]:1\", \"https://[::1]:1\"]\npassword_env = \"NOT_SET_ANYWHERE\"",
            &["store.ca: is missing", "store.user: is missing", "mixes", "NOT_SET_ANYWHERE"],
        );
        check(
            "kind = \"etcd\"\nendpoints = [\"http://127.0.0.1:1\"]\nca = \"none.crt\"",
            &["none.crt", "there are none"],
        );
        check(
            "kind = \"etcd\"\nendpoint = [\"http://a:1\"]",
            &[
                "store.endpoints: is missing",
                "store.endpoint: unknown key `endpoint`; did you mean endpoints?",
            ],
        );
    }
}
