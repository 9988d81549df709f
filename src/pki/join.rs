//! Joining of a role before it starts, and the task that keeps its identity folder current.

use crate::cli::JoinOptions;
use identity::{OwnName, name_in_pem};
use regions::spiffe::Role;
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
/// certificate. A file with the token is read only then, so it may be deleted afterwards. `region` is that of the command
/// line, which precedes that of the configuration.
///
/// # Errors
///
/// When the folder cannot be used, or has or would get a certificate of another role or region.
pub(crate) fn join(
    config: &Path,
    options: &JoinOptions,
    roles: &'static [Role],
    region: Option<&str>,
) -> Result<Joined, Vec<String>> {
    let JoinOptions { token, file } = options;
    let token = token.as_deref().map(|token| parse("--join", token)).transpose()?;
    let Some(JoinSections { dir, dns, region: written }) = JoinSections::read(config) else {
        let option = if file.is_some() { "--join-file" } else { "--join" };
        return match (token, file) {
            (None, None) => Ok(Joined::elsewhere()),
            _ => Err(vec![format!(
                "{option}: {} has no identity folder; add [identity] with dir",
                config.display()
            )]),
        };
    };
    // An invalid region is reported when the role reads its configuration.
    let own = OwnName { roles, region: region.or(written.as_deref()).and_then(|region| region.parse().ok()) };
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
            let joined = runtime
                .block_on(async { authority::join(&folder, &token, &own, &Resolver::new(&dns)).await });
            joined.map_err(|error| vec![format!("--join: {error}")])?;
        }
    } else if period.is_some() {
        check_name(&folder, &own)?;
    }
    Ok(Joined { folder: Some(folder), replicas: None, dns })
}

/// Verifies that a certificate which the built-in authority has issued is one of this process. With one of another role, the
/// process would ignore every token. Files that cannot be read are reported when the role reads its configuration.
fn check_name(folder: &IdentityFolder, own: &OwnName) -> Result<(), Vec<String>> {
    let name = std::fs::read(folder.files().certificate).ok().and_then(|chain| name_in_pem(&chain).ok());
    let Some(name) = name.filter(|name| !own.matches(name)) else { return Ok(()) };
    let roles = own.roles.iter().map(|role| role.as_str()).collect::<Vec<_>>().join(" or ");
    let within = own.region.as_ref().map_or_else(String::new, |region| format!(" in {region}"));
    Err(vec![format!(
        "identity.dir {} has the certificate of {name}, not that of a {roles}{within}; correct identity.dir, or delete this folder \
         and join again with a token of this role and region",
        folder.path().display()
    )])
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
    /// Region, of a role whose configuration has one.
    region: Option<String>,
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
            region: file.get("region").and_then(|region| region.as_str()).map(str::to_owned),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_client::identity_folder::Membership;

    const SPOKE: &[Role] = &[Role::Spoke];

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
        let problem =
            |token: &str| join(&config, &given(token), SPOKE, None).expect_err("it is rejected").join("\n");
        assert!(problem("meridian-join-1.AAAA").contains("typo"), "{}", problem("meridian-join-1.AAAA"));
        assert!(problem("x").contains("does not begin with"));
        let fingerprint = scheduler_core::pki::token::Fingerprint::of(b"1");
        let secret = scheduler_core::pki::token::JoinSecret::from_random([1; 20]);
        let token = JoinToken::new(vec!["hub:7001".to_owned()], vec![fingerprint], secret).expect("a token");
        assert!(problem(&token.text()).contains("add [identity] with dir"));
        assert!(
            join(&config, &JoinOptions::default(), SPOKE, None).is_ok_and(|joined| joined.folder.is_none())
        );
        let text = "[identity]\ndir = \"identity\"\n[dns]\nservers = [\"10.0.0.2:53\"]\n";
        std::fs::write(&config, text).expect("written");
        let joined = join(&config, &JoinOptions::default(), SPOKE, None).expect("a folder");
        assert_eq!(joined.dns.servers, [([10, 0, 0, 2], 53).into()], "names of hubs are resolved there too");
        assert_eq!(joined.folder.map(|it| it.path().to_owned()), Some(dir.path().join("identity")));
    }

    #[test]
    fn a_token_file_is_read_only_by_a_process_that_must_join() {
        let dir = tempfile::tempdir().expect("a folder");
        let [config, file, identity] = ["spoke.toml", "token", "identity"].map(|name| dir.path().join(name));
        let options = JoinOptions { token: None, file: Some(file.clone()) };
        std::fs::write(&config, "").expect("written");
        let problem = || join(&config, &options, SPOKE, None).expect_err("it is rejected").join("\n");
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
        assert!(join(&config, &options, SPOKE, None).is_ok(), "a folder with a certificate needs no token");
    }

    #[test]
    fn a_certificate_of_another_role_or_region_is_reported_with_the_folder_to_delete() {
        let dir = tempfile::tempdir().expect("a folder");
        let config = dir.path().join("spoke.toml");
        std::fs::write(&config, "region = \"aws/us-east-1\"\n[identity]\ndir = \"identity\"\n")
            .expect("written");
        let key = rcgen::KeyPair::generate().expect("a key");
        let mut params = rcgen::CertificateParams::default();
        let name = "spiffe://m.example/gateway/aws/us-east-1/in/us".try_into().expect("a URI");
        params.subject_alt_names = vec![rcgen::SanType::URI(name)];
        let certificate = params.self_signed(&key).expect("a certificate").pem();
        let membership = Membership {
            version: scheduler_api::VERSION,
            addresses: Vec::new(),
            serial: "01".to_owned(),
            authority: String::new(),
            not_before_s: 0,
            not_after_s: unix_time().as_secs() + 3600,
        };
        let folder = IdentityFolder::new(dir.path().join("identity"));
        folder.install(&certificate, &key.serialize_pem(), &membership).expect("written");
        // The token is not read: the certificate is valid.
        let options = JoinOptions { token: None, file: Some(dir.path().join("token")) };
        let problem = |roles, region| match join(&config, &options, roles, region) {
            Ok(_) => String::new(),
            Err(problems) => problems.join("\n"),
        };
        let of_spoke = problem(SPOKE, None);
        let named = folder.path().display().to_string();
        assert!(of_spoke.contains(&named) && of_spoke.contains("delete this folder"), "{of_spoke}");
        assert!(of_spoke.contains("not that of a spoke in aws/us-east-1"), "{of_spoke}");
        assert_eq!(problem(&[Role::Gateway], None), "");
        assert!(problem(&[Role::Gateway], Some("aws/us-west-2")).contains("in aws/us-west-2"));
    }
}
