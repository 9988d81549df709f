//! TOML values of the files that [`write_deployments`](crate::write_deployments) and
//! [`write_tenants`](crate::write_tenants) write.

use crate::residency::ResidencyPolicy;

/// Error for a policy that was combined from several: a configuration file has no form for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind} `{name}` has the residency `{residency}`; a file cannot express several conditions")]
pub struct Unwritable {
    kind: &'static str,
    name: String,
    residency: String,
}

/// Returns the value of the key `residency` of a deployment or tenant; `None` for the default.
pub(crate) fn residency(
    kind: &'static str,
    name: &impl ToString,
    policy: &ResidencyPolicy,
) -> Result<Option<String>, Unwritable> {
    match policy {
        ResidencyPolicy::Anywhere => Ok(None),
        ResidencyPolicy::Only(_) => match policy.only_condition() {
            Some(areas) => Ok(Some(format!("{{ allow = {} }}", list(areas)))),
            None => Err(Unwritable { kind, name: name.to_string(), residency: policy.to_string() }),
        },
    }
}

/// Formats an array of strings.
pub(crate) fn list<T: ToString>(each: impl IntoIterator<Item = T>) -> String {
    let each: Vec<_> = each.into_iter().map(quoted).collect();
    format!("[{}]", each.join(", "))
}

/// Quotes a string as TOML does.
pub(crate) fn quoted(text: impl ToString) -> String {
    toml::Value::String(text.to_string()).to_string()
}
