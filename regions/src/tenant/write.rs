//! Writing tenants as the file that would say the same: what a person reads back they can change and apply.

use std::fmt::Write;

use super::{TenantLimits, TenantRules};
use crate::residency::ResidencyPolicy;

/// A tenant that no file can say.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tenant `{name}` has the residency `{residency}`, and a file has no words for several conditions")]
pub struct NoWordsForTenant {
    name: String,
    residency: String,
}

/// The file that [`super::parse_tenants`] reads as these.
///
/// # Errors
///
/// When a residency has several conditions: to leave one out would widen it.
pub fn write_tenants<'a>(
    tenants: impl IntoIterator<Item = &'a TenantRules>,
) -> Result<String, NoWordsForTenant> {
    let mut text = String::new();
    for tenant in tenants {
        let TenantRules { id, .. } = tenant;
        writeln!(text, "[[tenant]]\nname = {}", quoted(id)).expect("a String takes every write");
        for (key, value) in tenant.fields()? {
            writeln!(text, "{key} = {value}").expect("a String takes every write");
        }
        text.push('\n');
    }
    // A file without a word is taken for a mistake; this one says that there is nobody.
    Ok(if text.is_empty() { "tenant = []\n".to_owned() } else { text })
}

impl TenantRules {
    /// What a file says of it beside its name, key by key; what has its usual value is left out.
    ///
    /// # Errors
    ///
    /// When its residency has several conditions, for which a file has no words.
    pub fn fields(&self) -> Result<Vec<(&'static str, String)>, NoWordsForTenant> {
        let TenantRules { id, keys, issuer, deployments, residency, priority, weight, limits } = self;
        let mut fields = Vec::new();
        if !keys.is_empty() {
            fields.push(("key_sha256", list(keys)));
        }
        fields.extend(issuer.as_ref().map(|issuer| ("issuer", quoted(issuer))));
        fields.extend(deployments.as_ref().map(|names| ("deployments", list(names))));
        match residency {
            ResidencyPolicy::Anywhere => {}
            ResidencyPolicy::Only(_) => {
                let areas = residency.only_condition().ok_or_else(|| NoWordsForTenant {
                    name: id.to_string(),
                    residency: residency.to_string(),
                })?;
                fields.push(("residency", format!("{{ allow = {} }}", list(areas))));
            }
        }
        fields.extend(priority.map(|priority| ("priorities", list([priority.as_str()]))));
        if *weight != 1 {
            fields.push(("weight", weight.to_string()));
        }
        let TenantLimits { requests_per_second, inputs_per_second, tokens_per_minute } = limits;
        let limits: Vec<_> = [
            ("requests_per_second", requests_per_second),
            ("inputs_per_second", inputs_per_second),
            ("tokens_per_minute", tokens_per_minute),
        ]
        .into_iter()
        .filter_map(|(key, limit)| Some(format!("{key} = {}", limit.as_ref()?)))
        .collect();
        if !limits.is_empty() {
            fields.push(("limits", format!("{{ {} }}", limits.join(", "))));
        }
        Ok(fields)
    }
}

fn list<T: ToString>(each: impl IntoIterator<Item = T>) -> String {
    let each: Vec<_> = each.into_iter().map(quoted).collect();
    format!("[{}]", each.join(", "))
}

/// As TOML quotes it.
fn quoted(text: impl ToString) -> String {
    toml::Value::String(text.to_string()).to_string()
}
