//! Joining of a role before it starts, and the task that keeps its identity folder current.

use crate::cli::JoinOptions;
use resolver::{DnsSection, Resolver};
use scheduler_client::authority;
use scheduler_client::identity_folder::IdentityFolder;
use scheduler_client::{membership, unix_time};
use scheduler_core::pki::issue::ValidityPeriod;
use scheduler_core::pki::token::{JoinToken, TokenTextError};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Identity folder of a role that the built-in authority keeps current.
#[derive(Clone, Debug)]
pub(crate) struct Joined {
    folder: Option<IdentityFolder>,
    /// Identity folder of the replicas that this spoke starts.
    replicas: Option<IdentityFolder>,
    /// Resolution of the names of hubs.
    dns: DnsSection,
}

impl Joined {
    /// Returns the value of a process whose folder is kept current elsewhere.
    pub(crate) fn elsewhere() -> Joined {
        Joined { folder: None, replicas: None, dns: DnsSection::default() }
    }

    /// Returns the same, with the identity folder of the replicas that this spoke starts.
    pub(crate) fn with_replicas(self, dir: Option<PathBuf>) -> Joined {
        Joined { replicas: dir.map(IdentityFolder::new), ..self }
    }

    /// Returns how names are resolved.
    pub(crate) fn dns(&self) -> &DnsSection {
        &self.dns
    }

    /// Keeps the folders current until the process ends.
    pub(crate) async fn follow(self, resolver: Resolver) {
        let Some(folder) = self.folder else { return };
        let replicas = async {
            if let Some(replicas) = self.replicas {
                let followed =
                    membership::follow_replicas(folder.clone(), replicas.clone(), resolver.clone());
                report_unreadable(&replicas, followed.await);
            }
        };
        let own = async {
            report_unreadable(&folder, membership::follow(folder.clone(), resolver.clone()).await);
        };
        tokio::join!(own, replicas);
        // A folder that another tool fills has nothing to follow.
    }
}

fn report_unreadable(folder: &IdentityFolder, followed: std::io::Result<()>) {
    if let Err(error) = followed {
        // The process uses its present certificate until it expires, and does not learn of revocations. Check the
        // folder, and restart the process.
        tracing::error!(folder = %folder.path().display(), %error, "identity folder unreadable");
    }
}

/// Completes an interrupted renewal of a role's identity folder, and joins with the token unless the folder has a valid
/// certificate. A file with the token is read only then, so it may be deleted afterwards.
pub(crate) fn join(config: &Path, options: &JoinOptions) -> Result<Joined, Vec<String>> {
    let JoinOptions { token, file } = options;
    let token = token.as_deref().map(|token| parse("--join", token)).transpose()?;
    let Some(JoinSections { dir, dns }) = JoinSections::read(config) else {
        let option = if file.is_some() { "--join-file" } else { "--join" };
        return match (token, file) {
            (None, None) => Ok(Joined::elsewhere()),
            _ => Err(vec![format!(
                "{option}: {} has no identity folder; add [identity] with dir",
                config.display()
            )]),
        };
    };
    let folder = IdentityFolder::new(dir);
    let unusable = |error: std::io::Error| vec![format!("identity.dir {}: {error}", folder.path().display())];
    folder.recover().map_err(unusable)?;
    let period = folder.membership().map_err(unusable)?.map(|membership| membership.period());
    if is_needed(folder.has_certificate(), period, unix_time()) {
        let token = match file {
            Some(file) => Some(read_token(file)?),
            None => token,
        };
        if let Some(token) = token {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime =
                runtime.map_err(|error| vec![format!("cannot start the async runtime: {error}")])?;
            // A resolver starts tasks, so it is created within the runtime.
            let joined =
                runtime.block_on(async { authority::join(&folder, &token, &Resolver::new(&dns)).await });
            joined.map_err(|error| vec![format!("--join: {error}")])?;
        }
    }
    Ok(Joined { folder: Some(folder), replicas: None, dns })
}

fn read_token(file: &Path) -> Result<JoinToken, Vec<String>> {
    let option = format!("--join-file {}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| {
        vec![format!("{option}: cannot be read: {error}; write a token of `meridian pki token` to this file")]
    })?;
    parse(&option, text.trim())
}

fn parse(option: &str, token: &str) -> Result<JoinToken, Vec<String>> {
    token.parse().map_err(|error: TokenTextError| vec![format!("{option}: {error}")])
}

/// Returns whether a process must join: a certificate of the folder is kept as long as it is valid.
fn is_needed(has_certificate: bool, period: Option<ValidityPeriod>, now: Duration) -> bool {
    match period {
        _ if !has_certificate => true,
        Some(period) => now > period.not_after,
        // A certificate from elsewhere.
        None => false,
    }
}

/// Parts of a configuration that are needed before it can be read as a whole, which needs the identity. Errors of the file
/// are reported when the role reads it.
struct JoinSections {
    /// Identity folder.
    dir: PathBuf,
    dns: DnsSection,
}

impl JoinSections {
    fn read(config: &Path) -> Option<JoinSections> {
        let file: toml::Table = std::fs::read_to_string(config).ok()?.parse().ok()?;
        let dir = file.get("identity")?.get("dir")?.as_str()?;
        let servers = file.get("dns").and_then(|dns| dns.get("servers")?.as_array());
        let servers = servers.into_iter().flatten().filter_map(|server| server.as_str()?.parse().ok());
        Some(JoinSections {
            dir: config.parent().unwrap_or(Path::new(".")).join(dir),
            dns: DnsSection { servers: servers.collect() },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_valid_certificate_is_kept_and_an_expired_one_is_replaced() {
        let second = Duration::from_secs(1);
        let period = Some(ValidityPeriod { not_before: second, not_after: second * 10 });
        assert!(is_needed(false, None, second) && is_needed(false, period, second));
        assert!(!is_needed(true, period, second * 10));
        assert!(is_needed(true, period, second * 11));
        assert!(!is_needed(true, None, second));
    }

    #[test]
    fn a_typo_and_a_missing_folder_are_reported_before_anything_is_sent() {
        let dir = tempfile::tempdir().expect("a folder");
        let config = dir.path().join("spoke.toml");
        std::fs::write(&config, "").expect("written");
        let given = |token: &str| JoinOptions { token: Some(token.to_owned()), file: None };
        let problem = |token: &str| join(&config, &given(token)).expect_err("it is rejected").join("\n");
        assert!(problem("meridian-join-1.AAAA").contains("typo"), "{}", problem("meridian-join-1.AAAA"));
        assert!(problem("x").contains("does not begin with"));
        let fingerprint = scheduler_core::pki::token::Fingerprint::of(b"1");
        let secret = scheduler_core::pki::token::JoinSecret::from_random([1; 20]);
        let token = JoinToken::new(vec!["hub:7001".to_owned()], vec![fingerprint], secret).expect("a token");
        assert!(problem(&token.text()).contains("add [identity] with dir"));
        assert!(join(&config, &JoinOptions::default()).is_ok_and(|joined| joined.folder.is_none()));
        let text = "[identity]\ndir = \"identity\"\n[dns]\nservers = [\"10.0.0.2:53\"]\n";
        std::fs::write(&config, text).expect("written");
        let joined = join(&config, &JoinOptions::default()).expect("a folder");
        assert_eq!(joined.dns.servers, [([10, 0, 0, 2], 53).into()], "names of hubs are resolved there too");
        assert_eq!(joined.folder.map(|it| it.path().to_owned()), Some(dir.path().join("identity")));
    }

    #[test]
    fn a_token_file_is_read_only_by_a_process_that_must_join() {
        let dir = tempfile::tempdir().expect("a folder");
        let [config, file, identity] = ["spoke.toml", "token", "identity"].map(|name| dir.path().join(name));
        let options = JoinOptions { token: None, file: Some(file.clone()) };
        std::fs::write(&config, "").expect("written");
        let problem = || join(&config, &options).expect_err("it is rejected").join("\n");
        assert!(problem().contains("add [identity] with dir"), "{}", problem());
        std::fs::write(&config, "[identity]\ndir = \"identity\"\n").expect("written");
        assert!(problem().contains("cannot be read") && problem().contains("--join-file"), "{}", problem());
        std::fs::write(&file, "meridian-join-1.AAAA\n").expect("written");
        assert!(problem().contains("typo"), "{}", problem());
        std::fs::remove_file(&file).expect("removed");
        std::fs::create_dir(&identity).expect("created");
        for name in ["certificate.pem", "key.pem", "authorities.pem"] {
            std::fs::write(identity.join(name), "from elsewhere").expect("written");
        }
        assert!(join(&config, &options).is_ok(), "a folder with a certificate needs no token");
    }
}
