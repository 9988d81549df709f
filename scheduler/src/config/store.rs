//! `[store]` of `hub.toml`: where the hub stores its state.

use std::path::{Path, PathBuf};
use std::time::Duration;

use scheduler_store::{EtcdConfig, EtcdTls, EtcdUser, KEEP_ALIVE};
use serde::Deserialize;

use super::Problems;

/// Default prefix of a hub's keys in etcd.
const PREFIX: &str = "meridian/";
/// Lower bound of the keep-alive interval; shorter ones would cost more than a connection that hangs for that long.
const KEEP_ALIVE_MS_MIN: u64 = 100;
/// Maximum number of etcd members. More than seven are slower and not safer (etcd's FAQ), and a few may be joining or
/// leaving.
const ENDPOINTS_MAX: usize = 16;

/// `[store]`, as parsed.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawStore {
    kind: Option<String>,
    endpoints: Option<Vec<String>>,
    prefix: Option<String>,
    keep_alive_ms: Option<u64>,
    user: Option<String>,
    password_file: Option<PathBuf>,
    password_env: Option<String>,
    ca: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
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

/// Parses `[store]` and `data`.
pub(super) fn read(
    problems: &mut Problems,
    raw: Option<RawStore>,
    data: Option<PathBuf>,
    base: &Path,
) -> Option<StoreConfig> {
    let raw = raw.unwrap_or(RawStore { kind: Some("embedded".to_owned()), ..RawStore::default() });
    match problems.need("store.kind", raw.kind.clone(), "\"embedded\" or \"etcd\"")?.as_str() {
        "embedded" => {
            raw.refuse_the_rest(problems);
            let data = problems.need("data", data, "\"FOLDER\", where the hub stores its state")?;
            Some(StoreConfig::Embedded { data: base.join(data) })
        }
        "etcd" => {
            if data.is_some() {
                problems.note(
                    "data has no effect with store.kind = \"etcd\", which stores the hub's state; remove it",
                );
            }
            raw.etcd(problems, base).map(StoreConfig::Etcd)
        }
        other => {
            problems.note(format!("store.kind = \"{other}\" is unknown; write \"embedded\" or \"etcd\""));
            None
        }
    }
}

impl RawStore {
    /// Rejects the keys of etcd for an embedded store.
    fn refuse_the_rest(&self, problems: &mut Problems) {
        let RawStore {
            kind: _,
            endpoints,
            prefix,
            keep_alive_ms,
            user,
            password_file,
            password_env,
            ca,
            certificate,
            key,
        } = self;
        let written = [
            ("endpoints", endpoints.is_some()),
            ("prefix", prefix.is_some()),
            ("keep_alive_ms", keep_alive_ms.is_some()),
            ("user", user.is_some()),
            ("password_file", password_file.is_some()),
            ("password_env", password_env.is_some()),
            ("ca", ca.is_some()),
            ("certificate", certificate.is_some()),
            ("key", key.is_some()),
        ];
        for (key, _) in written.iter().filter(|(_, written)| *written) {
            problems.note(format!("store.{key} is for kind = \"etcd\"; remove it, or set that kind"));
        }
    }

    fn etcd(self, problems: &mut Problems, base: &Path) -> Option<EtcdConfig> {
        let RawStore {
            kind: _,
            endpoints,
            prefix,
            keep_alive_ms,
            user,
            password_file,
            password_env,
            ca,
            certificate,
            key,
        } = self;
        let before = problems.0.len();
        let endpoints = problems.need(
            "store.endpoints",
            endpoints,
            "[\"http://10.0.0.1:2379\", …], the members of the etcd",
        );
        let endpoints = endpoints.map(|endpoints| problems.endpoints(endpoints)).unwrap_or_default();
        let prefix = prefix.unwrap_or_else(|| PREFIX.to_owned());
        if prefix.is_empty() {
            problems.note("store.prefix is empty; write the prefix of all keys, such as \"meridian/\"");
        }
        let keep_alive_ms = keep_alive_ms.map_or(KEEP_ALIVE, Duration::from_millis);
        if keep_alive_ms < Duration::from_millis(KEEP_ALIVE_MS_MIN) {
            problems.note(format!(
                "store.keep_alive_ms = {} is less than {KEEP_ALIVE_MS_MIN}; remove it, or write a value that the members' \
                 --grpc-keepalive-min-time allows",
                keep_alive_ms.as_millis()
            ));
        }
        let user = problems.user(user, password_file, password_env, base);
        let mut pem = |key: &str, path: Option<PathBuf>| {
            let path = path?;
            problems.file(&format!("store.{key}"), &base.join(path)).map(String::into_bytes)
        };
        let (has_ca, has_identity) = (ca.is_some(), certificate.is_some() || key.is_some());
        let (both, ca) = (certificate.is_some() == key.is_some(), pem("ca", ca));
        let identity = pem("certificate", certificate).zip(pem("key", key));
        if !both {
            problems.note("store.certificate and store.key belong together; set both or neither");
        }
        let https = endpoints.iter().any(|endpoint| endpoint.starts_with("https://"));
        match (https, has_ca) {
            (true, false) => problems.note(
                "store.ca is missing; write the file with the CA certificate that signs the members' certificates",
            ),
            (false, true) => problems.note("store.ca is for https:// endpoints, and there are none; remove it"),
            (true, true) | (false, false) => {}
        }
        if !has_ca && has_identity {
            problems.note("store.certificate and store.key are for https:// endpoints, and require store.ca");
        }
        let tls = ca.map(|authority| EtcdTls { authority, identity });
        (problems.0.len() == before).then_some(EtcdConfig {
            endpoints,
            prefix,
            keep_alive: keep_alive_ms,
            user,
            tls,
        })
    }
}

impl Problems {
    fn endpoints(&mut self, endpoints: Vec<String>) -> Vec<String> {
        if endpoints.is_empty() || endpoints.len() > ENDPOINTS_MAX {
            self.note(format!("store.endpoints has {}; write 1 to {ENDPOINTS_MAX}", endpoints.len()));
        }
        let of = |scheme: &str| endpoints.iter().filter(|endpoint| endpoint.starts_with(scheme)).count();
        if of("http://") > 0 && of("https://") > 0 {
            self.note("store.endpoints mixes http:// and https://; use one of them for all");
        }
        for endpoint in &endpoints {
            let rest = endpoint.strip_prefix("http://").or_else(|| endpoint.strip_prefix("https://"));
            let address = rest.and_then(|rest| rest.rsplit_once(':'));
            let plain = |host: &str| !host.is_empty() && !host.contains(['/', '@', '?', '#', ' ']);
            let holds = address
                .is_some_and(|(host, port)| plain(host) && port.parse::<u16>().is_ok_and(|port| port > 0));
            if !holds {
                self.note(format!(
                    "store.endpoints: \"{endpoint}\" is not the URL of an etcd member; write \"http://HOST:PORT\" or \
                     \"https://HOST:PORT\""
                ));
            }
        }
        endpoints
    }

    fn user(
        &mut self,
        name: Option<String>,
        file: Option<PathBuf>,
        variable: Option<String>,
        base: &Path,
    ) -> Option<EtcdUser> {
        let password = match (file, variable) {
            (None, None) => None,
            (Some(file), None) => Some(self.file("store.password_file", &base.join(file))?),
            (None, Some(variable)) => {
                let value = std::env::var(&variable).ok();
                if value.is_none() {
                    self.note(format!("store.password_env = \"{variable}\" is not set in the environment"));
                }
                Some(value?)
            }
            (Some(_), Some(_)) => {
                self.note("store.password_file and store.password_env are both set; set one of them");
                return None;
            }
        };
        match (name, password) {
            (None, None) => None,
            (Some(name), Some(password)) => Some(EtcdUser { name, password: password.trim().to_owned() }),
            (Some(name), None) => {
                self.note(format!(
                    "store.user = \"{name}\" has no password; set password_file or password_env"
                ));
                None
            }
            (None, Some(_)) => {
                self.note("store.user is missing; write the name of the user with this password");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, base: &Path) -> Result<StoreConfig, Vec<String>> {
        let mut problems = Problems::default();
        let raw = super::super::raw(text)?;
        let store = read(&mut problems, Some(raw), None, base);
        store.filter(|_| problems.0.is_empty()).ok_or(problems.0)
    }

    #[test]
    fn all_keys_of_an_etcd_are_parsed() {
        let base = tempfile::tempdir().unwrap();
        for name in ["ca.crt", "hub.crt", "hub.key"] {
            std::fs::write(base.path().join(name), name).unwrap();
        }
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
        assert_eq!(etcd.tls.as_ref().map(|tls| tls.authority.as_slice()), Some(&b"ca.crt"[..]));
        assert!(!format!("{etcd:?}").contains("secret"), "a password must not appear in logs");

        let Ok(StoreConfig::Etcd(etcd)) =
            parse("kind = \"etcd\"\nendpoints = [\"http://a:1\"]\n", base.path())
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
        check("", &["store.kind is missing"]);
        check("kind = \"etdc\"", &["\"etdc\" is unknown"]);
        check(
            "kind = \"embedded\"\nprefix = \"a\"\nuser = \"a\"",
            &["store.prefix is for", "store.user is for", "data is missing"],
        );
        check("kind = \"embedded\"", &["data is missing"]);
        check("kind = \"etcd\"", &["store.endpoints is missing"]);
        check("kind = \"etcd\"\nendpoints = []", &["has 0"]);
        let many = vec!["http://a:1"; ENDPOINTS_MAX + 1];
        check(&format!("kind = \"etcd\"\nendpoints = {many:?}"), &["has 17"]);
        check(
            "kind = \"etcd\"\nendpoints = [\"a:1\", \"http://a\", \"http://a:0\", \"http://a/b:1\"]\nprefix = \"\"\n\
             keep_alive_ms = 99\nuser = \"hub\"\nkey = \"none.key\"",
            &[
                "\"a:1\"",
                "\"http://a\"",
                "\"http://a:0\"",
                "\"http://a/b:1\"",
                "store.prefix",
                "is less than 100",
                "has no password",
                "none.key",
                "belong together",
                "require store.ca",
            ],
        );
        check(
            "kind = \"etcd\"\nendpoints = [\"http://a:1\", \"https://a:1\"]\npassword_env = \"NOT_SET_ANYWHERE\"",
            &["mixes", "NOT_SET_ANYWHERE", "store.ca is missing"],
        );
        check(
            "kind = \"etcd\"\nendpoints = [\"http://a:1\"]\nca = \"none.crt\"",
            &["none.crt", "there are none"],
        );
        check("kind = \"etcd\"\nendpoint = [\"http://a:1\"]", &["unknown field `endpoint`"]);
    }
}
