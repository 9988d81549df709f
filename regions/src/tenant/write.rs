//! Serializer of tenants as a tenants file, which an operator can edit and apply.

use std::fmt::Write;

use super::{TenantLimits, TenantRules};
use crate::written::{self, Unwritable, list, quoted};

/// Returns a file that [`super::parse_tenants`] reads as these tenants.
///
/// # Errors
///
/// If a residency policy has several conditions: omitting one would widen the policy.
pub fn write_tenants<'a>(tenants: impl IntoIterator<Item = &'a TenantRules>) -> Result<String, Unwritable> {
    let mut text = String::new();
    for tenant in tenants {
        let TenantRules { id, .. } = tenant;
        writeln!(text, "[[tenant]]\nname = {}", quoted(id)).expect("writing to a String cannot fail");
        for (key, value) in tenant.fields()? {
            writeln!(text, "{key} = {value}").expect("writing to a String cannot fail");
        }
        text.push('\n');
    }
    // An empty file is treated as a mistake; this one states that there are no tenants.
    Ok(if text.is_empty() { "tenant = []\n".to_owned() } else { text })
}

impl TenantRules {
    /// Returns the keys and values of the tenant's entry except the name; default values are omitted.
    ///
    /// # Errors
    ///
    /// If the residency policy has several conditions, which a file cannot express.
    pub fn fields(&self) -> Result<Vec<(&'static str, String)>, Unwritable> {
        let TenantRules { id, keys, issuer, deployments, residency, priority, weight, limits } = self;
        let mut fields = Vec::new();
        if !keys.is_empty() {
            fields.push(("key_sha256", list(keys)));
        }
        fields.extend(issuer.as_ref().map(|issuer| ("issuer", quoted(issuer))));
        fields.extend(deployments.as_ref().map(|names| ("deployments", list(names))));
        let residency = written::residency("tenant", id, residency)?;
        fields.extend(residency.map(|residency| ("residency", residency)));
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
