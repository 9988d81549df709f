//! `meridian key`: creates, lists and revokes API keys of applied tenants.
//!
//! The key is drawn here and printed once. The hub receives its SHA-256, so neither the hub nor its store can reveal it.

use crate::apply::{CommandError, RECORD_TIMEOUT, client, run};
use crate::cli::{CreateKeyOptions, KeyCommand, KeyHubOptions, RevokeKeyOptions};
use gateway_core::keys::Digest;
use regions::tenant::KeyDigest;
use reqwest::StatusCode;
use scheduler_api::VERSION;
use scheduler_api::api_key::{CreateKeyV1, CreatedKeyV1, CreatedKeysV1};
use scheduler_client::hub::HubCallError;
use scheduler_client::operator::OperatorClient;
use serde_json::json;
use std::process::ExitCode;
use std::time::SystemTime;

/// Beginning of every created key, by which scanners for leaked secrets recognise it.
const PREFIX: &str = "mk_";

/// Runs the command. Fails if the hub is unreachable or rejects the request.
pub(crate) fn main(command: &KeyCommand) -> ExitCode {
    match command {
        KeyCommand::Create(options) => run(options.hub.json, create(options)),
        KeyCommand::List(options) => run(options.json, list(options)),
        KeyCommand::Revoke(options) => run(options.hub.json, revoke(options)),
    }
}

fn operator(KeyHubOptions { hub, caller, json: _ }: &KeyHubOptions) -> Result<OperatorClient, String> {
    client(hub, caller, RECORD_TIMEOUT)
}

/// Returns the error of a call; that of an invalid option is one of the command line.
fn call_error(error: HubCallError) -> CommandError {
    match error.failure.status() {
        Some(StatusCode::BAD_REQUEST) => CommandError::Usage(vec![error.to_string()]),
        Some(_) | None => error.into(),
    }
}

/// Draws a key of 256 random bits.
fn new_key() -> String {
    let bytes: [u8; 32] = rand::random();
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{PREFIX}{digits}")
}

/// Returns the seconds of `--expires`.
fn validity(text: &str) -> Result<u64, CommandError> {
    let parsed =
        regions::duration::parse(text).map(|duration| duration.as_secs()).filter(|seconds| *seconds > 0);
    parsed.ok_or_else(|| {
        CommandError::Usage(vec![format!(
            "--expires {text} is not a time of a second or more; write 90d or 12h"
        )])
    })
}

async fn create(options: &CreateKeyOptions) -> Result<String, CommandError> {
    let CreateKeyOptions { tenant, name, owner, expires, hub } = options;
    let expires_in_s = expires.as_deref().map(validity).transpose()?;
    let key = new_key();
    let message = CreateKeyV1 {
        version: VERSION,
        tenant: tenant.clone(),
        key_sha256: KeyDigest::from(Digest::of(key.as_bytes())).to_string(),
        name: name.clone(),
        owner: owner.clone(),
        expires_in_s,
    };
    let created = operator(hub)?.create_key(&message).await.map_err(call_error)?;
    if hub.json {
        return Ok(format!("{:#}", json!({"key": key, "created": created})));
    }
    eprintln!("key {} of tenant {tenant}; it is shown only now:", created.id);
    Ok(key)
}

async fn list(options: &KeyHubOptions) -> Result<String, CommandError> {
    let keys = operator(options)?.keys().await.map_err(call_error)?;
    if options.json {
        return Ok(format!("{:#}", json!(keys)));
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    Ok(table(&keys, now))
}

async fn revoke(options: &RevokeKeyOptions) -> Result<String, CommandError> {
    let RevokeKeyOptions { id, hub } = options;
    if id.len() != 16 || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        let problem = "an identifier has 16 hexadecimal digits; `meridian key list` shows those of all keys";
        return Err(CommandError::Usage(vec![problem.to_owned()]));
    }
    let id = id.to_lowercase();
    operator(hub)?.revoke_key(&id).await.map_err(call_error)?;
    Ok(if hub.json { format!("{:#}", json!({"revoked": id})) } else { format!("key {id} is revoked") })
}

/// Formats keys, one line each.
fn table(keys: &CreatedKeysV1, now: u64) -> String {
    if keys.keys.is_empty() {
        return "no keys were created".to_owned();
    }
    let days = |seconds: u64| seconds / 86_400;
    let line =
        |CreatedKeyV1 { id, tenant, key_sha256: _, name, owner, created_at, expires_at }: &CreatedKeyV1| {
            let expiry = match expires_at {
                None => "does not expire".to_owned(),
                Some(at) if *at <= now => "EXPIRED".to_owned(),
                Some(at) if at - now < 86_400 => format!("expires in {} h", (at - now) / 3600),
                Some(at) => format!("expires in {} d", days(at - now)),
            };
            let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
            let age = days(now.saturating_sub(*created_at));
            format!(
                "{id}  {tenant}  name {}  owner {}  created {age} d ago  {expiry}",
                text(name),
                text(owner)
            )
        };
    keys.keys.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_random_and_recognisable() {
        let (one, other) = (new_key(), new_key());
        assert!(one.starts_with(PREFIX) && one.len() == PREFIX.len() + 64 && one != other);
    }

    #[test]
    fn a_validity_is_a_positive_duration() {
        assert_eq!(validity("90d").ok(), Some(90 * 86_400));
        for text in ["0s", "-1d", "90", "d", "500ms", "1w"] {
            assert!(matches!(validity(text), Err(CommandError::Usage(_))), "{text}");
        }
    }

    #[test]
    fn a_list_shows_expiry() {
        let key = |name: &str, expires_at| CreatedKeyV1 {
            id: "a".repeat(16),
            tenant: "acme".to_owned(),
            key_sha256: "a".repeat(64),
            name: Some(name.to_owned()),
            owner: None,
            created_at: 0,
            expires_at,
        };
        let keys = vec![key("a", None), key("b", Some(10)), key("c", Some(100 + 86_400 * 3))];
        let shown = table(&CreatedKeysV1 { version: VERSION, keys }, 100);
        for part in ["name a  owner -  created 0 d ago  does not expire", "EXPIRED", "expires in 3 d"] {
            assert!(shown.contains(part), "{part} in {shown}");
        }
    }
}
