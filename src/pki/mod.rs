//! `meridian pki`: the built-in certificate authority of the hub.
//!
//! `init` works without a hub. All other commands call the authority with the certificate of an operator, which they renew
//! when half of its life is over.

mod join;

pub(crate) use join::{Joined, join};

use crate::apply::{CommandError, operator_token, run};
use crate::cli::{
    InitOptions, IssueOptions, MemberOptions, PkiCommand, RevokeOptions, RotateOptions, TokenOptions,
};
use identity::OwnName;
use regions::spiffe::Role;
use regions::{Catalogue, RegionId, duration};
use resolver::{DnsSection, Resolver};
use scheduler::hub::pki::init::{self, AuthorityFolders, NewAuthority};
use scheduler_api::pki::{
    CertificatesV1, NewTokenResponseV1, NewTokenV1, RevocationsV1, RevokeV1, RotateV1, RotationV1,
};
use scheduler_api::{VERSION, paths};
use scheduler_client::authority::{self, AuthorityConnection, AuthorityError};
use scheduler_client::identity_folder::IdentityFolder;
use scheduler_client::unix_time;
use scheduler_core::pki::issue;
use scheduler_core::pki::token::JoinToken;
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

impl From<AuthorityError> for CommandError {
    fn from(error: AuthorityError) -> CommandError {
        match error.status() {
            Some(status) if status.as_u16() == 400 => CommandError::Usage(vec![error.to_string()]),
            Some(_) | None => CommandError::Failed(error.to_string()),
        }
    }
}

/// Runs a command.
pub(crate) fn main(command: &PkiCommand) -> ExitCode {
    match command {
        PkiCommand::Init(options) => run(options.json, async { init(options) }),
        PkiCommand::Token(options) => run(options.member.json, token(options)),
        PkiCommand::Issue(options) => run(options.member.json, issue(options)),
        PkiCommand::List(options) => run(options.json, list(options)),
        PkiCommand::Revoke(options) => run(options.member.json, revoke(options)),
        PkiCommand::Rotate(options) => run(options.member.json, rotate(options)),
    }
}

fn init(options: &InitOptions) -> Result<String, CommandError> {
    let InitOptions { dir, trust_domain, region, operator, authority, catalogue, if_absent, json } = options;
    if *if_absent && ["authority", "hub", "operator"].iter().all(|name| dir.join(name).exists()) {
        return Ok(format!("{} has an authority already", dir.display()));
    }
    let region: RegionId = region.parse().map_err(|error| format!("--region: {error}"))?;
    let catalogue = match catalogue {
        None => Catalogue::builtin(),
        Some(file) => {
            let text = std::fs::read_to_string(file)
                .map_err(|error| format!("--catalogue {}: {error}", file.display()))?;
            let parsed = Catalogue::parse(&text);
            parsed.map_err(|problems| CommandError::Usage(configuration::named(file, problems)))?
        }
    };
    if let Some(wrong) = authority.iter().find(|it| !scheduler_core::pki::token::is_address(it)) {
        return Err(format!("--authority {wrong}: write HOST:PORT").into());
    }
    let request = NewAuthority {
        dir,
        domain: trust_domain,
        region: &region,
        operator,
        operator_validity: issue::VALIDITY,
        addresses: authority.clone(),
        catalogue: &catalogue,
    };
    let created = init::create(&request, unix_time()).map_err(CommandError::Failed)?;
    let AuthorityFolders { authority, hub, operator, fingerprint } = created;
    let [authority, hub, operator] = [authority, hub, operator].map(|path| path.display().to_string());
    if *json {
        let value = json!({
            "authority": authority, "hub": hub, "operator": operator, "fingerprint": fingerprint,
        });
        return Ok(format!("{value:#}"));
    }
    Ok(format!(
        "created the authority {fingerprint}\n\n\
         {authority}   certificate and key of the authority: the hub needs it; keep a backup\n\
         {hub}   identity of the first hub\n\
         {operator}   identity of the first operator: keep it where you run `meridian pki`\n\n\
         Next: in hub.toml\n\n\
         [identity]\ndir = \"{hub}\"\n\n\
         [authority]\nlisten = \"0.0.0.0:7001\"\ndir = \"{authority}\"\n\n\
         Then start the hub, and create a token for each process:\n\n  \
         export MERIDIAN_IDENTITY={operator}\n  \
         meridian pki token --role spoke --region {region}"
    ))
}

/// Parses a duration of the command line.
fn duration(name: &str, text: &str) -> Result<Duration, CommandError> {
    let parsed = duration::parse(text);
    parsed.ok_or_else(|| format!("--{name} {text}: write a number with a unit, such as 1h or 7d").into())
}

/// Connects with the identity of the caller, after its certificate was renewed if half of its life is over.
async fn connect(options: &MemberOptions) -> Result<(AuthorityConnection, Vec<String>), CommandError> {
    let MemberOptions { caller, authority, json: _ } = options;
    let resolver = Resolver::new(&DnsSection::default());
    if let Some(token) = operator_token(caller)? {
        if authority.is_empty() {
            return Err("a token has no address of an authority; give --authority HOST:PORT"
                .to_owned()
                .into());
        }
        let connection = AuthorityConnection::with_operator_token(&token, authority, &resolver).await?;
        return Ok((connection, authority.clone()));
    }
    let Some(identity) = &caller.identity else {
        let problem = "give --identity DIR, or set MERIDIAN_IDENTITY; or give --token-file FILE and --authority HOST:PORT";
        return Err(problem.to_owned().into());
    };
    let folder = IdentityFolder::new(identity);
    let unusable = |error: std::io::Error| format!("--identity {}: {error}", identity.display());
    folder.recover().map_err(unusable)?;
    let membership = folder.membership().map_err(unusable)?;
    let known = membership.as_ref().map(|it| it.addresses.clone()).unwrap_or_default();
    let addresses = if authority.is_empty() { known.clone() } else { authority.clone() };
    if addresses.is_empty() {
        return Err(format!(
            "--identity {} has no address of an authority; give --authority HOST:PORT",
            identity.display()
        )
        .into());
    }
    let mut connection = AuthorityConnection::with_identity(&folder, &addresses, &resolver).await?;
    let Some(membership) = membership else { return Ok((connection, addresses)) };
    // The folder of a person has no task that keeps it current.
    let current = folder.trust().map_err(unusable)?;
    let after = current.as_ref().map(|trust| trust.generation);
    let offered = connection.poll_trust(after, Duration::ZERO).await?;
    let newer = offered.and_then(|offered| offered.accept(current.as_ref(), unix_time()));
    if let Some(newer) = &newer {
        folder.write_trust(newer).map_err(unusable)?;
    }
    let signer = newer.or(current).map(|trust| trust.signer().fingerprint.to_string());
    let is_old = signer.is_some_and(|signer| signer != membership.authority);
    if is_old || issue::renewal(membership.period(), false, 0.5, unix_time()) <= unix_time() {
        authority::renew(&folder, &mut connection, &known).await?;
        connection = AuthorityConnection::with_identity(&folder, &addresses, &resolver).await?;
    }
    Ok((connection, addresses))
}

/// Creates a token; returns it with the name in its certificate.
pub(crate) async fn create(
    connection: &mut AuthorityConnection,
    addresses: Vec<String>,
    request: &NewTokenV1,
) -> Result<(JoinToken, NewTokenResponseV1), CommandError> {
    let created: NewTokenResponseV1 = connection.post(paths::JOIN_TOKENS, request).await?;
    let invalid = |problem: String| CommandError::Failed(format!("invalid response of the hub: {problem}"));
    let fingerprints = created.fingerprints.iter().map(|text| text.parse()).collect::<Result<_, String>>();
    let secret = created.secret.parse().map_err(invalid)?;
    let token = JoinToken::new(addresses, fingerprints.map_err(invalid)?, secret);
    Ok((token.map_err(|error| invalid(error.to_string()))?, created))
}

async fn token(options: &TokenOptions) -> Result<String, CommandError> {
    let TokenOptions { role, region, name, ttl, validity, member } = options;
    let (ttl, validity) = (
        duration("ttl", ttl)?,
        validity.as_deref().map(|validity| duration("validity", validity)).transpose()?,
    );
    let (mut connection, addresses) = connect(member).await?;
    let request = NewTokenV1 {
        version: VERSION,
        role: role.clone(),
        region: region.clone(),
        name: name.clone(),
        ttl_s: ttl.as_secs(),
        validity_s: validity.map(|validity| validity.as_secs()),
    };
    let (token, created) = create(&mut connection, addresses, &request).await?;
    if member.json {
        let value =
            json!({"token": token.text(), "subject": created.subject, "expires_s": created.expires_s});
        return Ok(format!("{value:#}"));
    }
    // The token alone on stdout, so that a script can use it.
    eprintln!("one use, within {}, as {}:", duration::write(ttl), created.subject);
    Ok(token.text())
}

async fn issue(options: &IssueOptions) -> Result<String, CommandError> {
    let IssueOptions { role, name, out, validity, member } = options;
    let folder = IdentityFolder::new(out);
    if folder.has_certificate() {
        return Err(
            format!("--out {} has a certificate already; choose another folder", out.display()).into()
        );
    }
    let validity = duration("validity", validity)?;
    let (mut connection, addresses) = connect(member).await?;
    let request = NewTokenV1 {
        version: VERSION,
        role: role.clone(),
        region: None,
        name: Some(name.clone()),
        ttl_s: scheduler_core::pki::token::TTL_MIN.as_secs(),
        validity_s: Some(validity.as_secs()),
    };
    let (token, created) = create(&mut connection, addresses, &request).await?;
    // The role and the name are those of the token that this command has created.
    let (own, resolver) =
        (OwnName { roles: &Role::ALL, region: None }, Resolver::new(&DnsSection::default()));
    let membership = authority::join(&folder, &token, &own, &resolver).await?;
    if member.json {
        let value = json!({
            "identity": out, "subject": created.subject, "serial": membership.serial,
            "expires_s": membership.not_after_s,
        });
        return Ok(format!("{value:#}"));
    }
    Ok(format!("{} is an identity of {}, for {}", out.display(), created.subject, duration::write(validity)))
}

async fn list(options: &MemberOptions) -> Result<String, CommandError> {
    let (mut connection, _) = connect(options).await?;
    let listed: CertificatesV1 = connection.get(paths::CERTIFICATES).await?;
    if options.json {
        return serde_json::to_string_pretty(&listed)
            .map_err(|error| CommandError::Failed(error.to_string()));
    }
    let now = unix_time().as_secs();
    let left = |end: u64| duration::write(Duration::from_secs(end.saturating_sub(now) / 60 * 60));
    let mut lines = vec![format!("{:<32}  {:<9} {:<8} OWNER", "SERIAL", "STATE", "VALID")];
    for certificate in &listed.certificates {
        let state = match (listed.revoked.contains(&certificate.serial), certificate.renewals) {
            (true, _) => "revoked",
            (false, 0) => "current",
            (false, _) => "renewed",
        };
        let valid = left(certificate.not_after_s);
        lines.push(format!("{:<32}  {state:<9} {valid:<8} {}", certificate.serial, certificate.subject));
    }
    for token in &listed.tokens {
        let valid = left(token.expires_s);
        lines.push(format!("{:<32}  {:<9} {valid:<8} {}", "(join token)", "unused", token.subject));
    }
    Ok(lines.join("\n"))
}

async fn revoke(options: &RevokeOptions) -> Result<String, CommandError> {
    let RevokeOptions { target, own, member } = options;
    let (mut connection, _) = connect(member).await?;
    let request = RevokeV1 { version: VERSION, target: target.clone(), own: *own };
    let RevocationsV1 { version: _, revoked, tokens } = connection.post(paths::REVOKE, &request).await?;
    if member.json {
        return Ok(format!("{:#}", json!({"revoked": revoked, "tokens": tokens})));
    }
    let mut lines: Vec<_> =
        revoked.iter().map(|it| format!("revoked {} of {}", it.serial, it.subject)).collect();
    if tokens > 0 {
        lines.push(format!("deleted {tokens} unused join tokens"));
    }
    lines.push("connections of these certificates are closed within 2 s where a hub is reachable".to_owned());
    Ok(lines.join("\n"))
}

async fn rotate(options: &RotateOptions) -> Result<String, CommandError> {
    let RotateOptions { yes, cancel, force, certificate, member } = options;
    let certificate = certificate.as_deref().map(read).transpose()?;
    let (mut connection, _) = connect(member).await?;
    let before: RotationV1 = connection.get(paths::ROTATION).await?;
    if !(*yes || *cancel) {
        return Ok(shown(&before, member.json));
    }
    let request =
        RotateV1 { version: VERSION, phase: before.phase, certificate, cancel: *cancel, force: *force };
    let after: RotationV1 = connection.post(paths::ROTATION, &request).await?;
    Ok(shown(&after, member.json))
}

fn read(file: &Path) -> Result<String, String> {
    std::fs::read_to_string(file).map_err(|error| format!("--certificate {}: {error}", file.display()))
}

/// Formats the phase of a rotation, with what follows.
fn shown(rotation: &RotationV1, json: bool) -> String {
    if json {
        return serde_json::to_string_pretty(rotation).unwrap_or_default();
    }
    let mut lines = Vec::new();
    for (index, authority) in rotation.authorities.iter().enumerate() {
        let signs = if index == rotation.signer { "trusted, signs" } else { "trusted" };
        lines.push(format!("{}  {signs}", authority.fingerprint));
    }
    lines.push(String::new());
    lines.push(
        match rotation.phase.as_str() {
            "single" => {
                "One authority is trusted. The next step creates another one, which all processes then trust; the \
                 present one goes on signing. It can be cancelled."
            }
            "next_trusted" => {
                "Two authorities are trusted, and the old one signs. With several hubs, copy the new files of the \
                 authority directory to all of them now. The next step lets the new one sign, and all processes \
                 renew their certificates within a minute. It cannot be cancelled afterwards."
            }
            _ => {
                "Two authorities are trusted, and the new one signs. The next step removes the old one: certificates \
                 that it signed are rejected from then on. Delete its key afterwards."
            }
        }
        .to_owned(),
    );
    if !rotation.waiting_for.is_empty() {
        lines.push(String::new());
        lines.push("The next step waits for:".to_owned());
        lines.extend(rotation.waiting_for.iter().map(|name| format!("  {name}")));
    } else {
        lines.push("Every process is ready for it: run `meridian pki rotate --yes`.".to_owned());
    }
    lines.join("\n")
}
