//! Difference between current and desired deployments and tenants, in terms of the configuration files.

use std::collections::{BTreeMap, BTreeSet};

use regions::tenant::{KeyDigest, TenantLimits};
use regions::{
    Catalogue, Deployment, DeploymentName, EngineSpec, RegionId, ResidencyPolicy, Scaling, TenantId,
    TenantRules,
};

use scheduler_api::apply::{ChangeKind, ChangeV1, FieldV1, Kind, ResidencyChange};

/// Fields except the name, as they are named in the file; `None` if absent there.
type Fields = Vec<(String, Option<String>)>;

/// Returns the change of each deployment that differs.
pub fn deployments(
    before: &BTreeMap<DeploymentName, Deployment>,
    after: &BTreeMap<DeploymentName, Deployment>,
    catalogue: &Catalogue,
) -> Vec<ChangeV1> {
    let residency_change =
        |was: &Deployment, is: &Deployment| residency_change(&was.residency, &is.residency, catalogue);
    changes(Kind::Deployment, before, after, fields, residency_change)
}

/// Returns the change of each tenant that differs.
pub fn tenants(
    before: &BTreeMap<TenantId, TenantRules>,
    after: &BTreeMap<TenantId, TenantRules>,
    catalogue: &Catalogue,
) -> Vec<ChangeV1> {
    let residency_change =
        |was: &TenantRules, is: &TenantRules| residency_change(&was.residency, &is.residency, catalogue);
    changes(Kind::Tenant, before, after, tenant_fields, residency_change)
}

fn changes<Name: Ord + ToString, T: PartialEq>(
    kind: Kind,
    before: &BTreeMap<Name, T>,
    after: &BTreeMap<Name, T>,
    fields: impl Fn(&T) -> Fields,
    residency_change: impl Fn(&T, &T) -> ResidencyChange,
) -> Vec<ChangeV1> {
    let names: BTreeSet<_> = before.keys().chain(after.keys()).collect();
    let change = |name: &Name| {
        let (before, after) = (before.get(name), after.get(name));
        let change = match (before, after) {
            (None, _) => ChangeKind::Added,
            (_, None) => ChangeKind::Removed,
            (Some(before), Some(after)) if before == after => return None,
            (Some(_), Some(_)) => ChangeKind::Changed,
        };
        let residency_change = before.zip(after).map(|(before, after)| residency_change(before, after));
        let (was, is) = (before.map(&fields).unwrap_or_default(), after.map(&fields).unwrap_or_default());
        Some(ChangeV1 { kind, name: name.to_string(), change, fields: changed(&was, &is, residency_change) })
    };
    names.into_iter().filter_map(change).collect()
}

/// Returns the fields that differ.
fn changed(was: &Fields, is: &Fields, residency_change: Option<ResidencyChange>) -> Vec<FieldV1> {
    let removed = was.iter().filter(|(field, _)| !is.iter().any(|(there, _)| there == field));
    let names = is.iter().chain(removed).map(|(field, _)| field.as_str());
    let field = |name: &str| FieldV1 {
        field: name.to_owned(),
        before: value(was, name),
        after: value(is, name),
        residency_change: residency_change.filter(|_| name == "residency"),
    };
    names.map(field).filter(|field| field.before != field.after).collect()
}

fn value(fields: &[(String, Option<String>)], name: &str) -> Option<String> {
    fields.iter().find(|(field, _)| *field == name).and_then(|(_, value)| value.clone())
}

fn fields(deployment: &Deployment) -> Fields {
    let Deployment { name: _, task, model, engine, residency, regions, order, placement, scaling } =
        deployment;
    let EngineSpec { kind, precision } = engine;
    let list = |regions: &[RegionId]| {
        let names: Vec<_> = regions.iter().map(|region| region.as_str()).collect();
        (!names.is_empty()).then(|| names.join(", "))
    };
    let mut fields = vec![
        ("task".to_owned(), Some(task.to_string())),
        ("model".to_owned(), Some(model.clone())),
        ("engine".to_owned(), Some(format!("{kind} {precision}"))),
        ("residency".to_owned(), Some(residency.to_string())),
        ("regions".to_owned(), list(regions)),
        ("routing.order".to_owned(), list(order)),
    ];
    if let Some(placement) = placement {
        let keys = placement.key_values();
        fields.extend(keys.map(|(key, value)| (format!("placement.{key}"), value)));
    }
    if *scaling != Scaling::default() {
        fields.extend(scaling.key_values().map(|(knob, value)| (format!("scaling.{knob}"), value)));
    }
    fields
}

fn tenant_fields(tenant: &TenantRules) -> Fields {
    let TenantRules { id: _, keys, issuer, deployments, residency, priority, weight, limits } = tenant;
    let TenantLimits { requests_per_second, inputs_per_second, tokens_per_minute } = limits;
    // A prefix that is long enough to distinguish keys.
    let key = |key: &KeyDigest| key.to_string().chars().take(12).collect();
    let keys: Vec<String> = keys.iter().map(key).collect();
    let list: Option<Vec<_>> =
        deployments.as_ref().map(|names| names.iter().map(|name| name.as_str()).collect());
    [
        ("key_sha256", (!keys.is_empty()).then(|| keys.join(", "))),
        ("issuer", issuer.clone()),
        ("deployments", Some(list.map_or_else(|| "all".to_owned(), |names| names.join(", ")))),
        ("residency", Some(residency.to_string())),
        ("priorities", priority.map(|priority| priority.as_str().to_owned())),
        ("weight", Some(weight.to_string())),
        ("limits.requests_per_second", requests_per_second.map(|limit| limit.to_string())),
        ("limits.inputs_per_second", inputs_per_second.map(|limit| limit.to_string())),
        ("limits.tokens_per_minute", tokens_per_minute.map(|limit| limit.to_string())),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

/// Returns the effect of a policy change on the allowed regions.
pub fn residency_change(
    before: &ResidencyPolicy,
    after: &ResidencyPolicy,
    catalogue: &Catalogue,
) -> ResidencyChange {
    let (was, is) = (before.permitted(catalogue), after.permitted(catalogue));
    match (is.is_subset(&was), was.is_subset(&is)) {
        (true, true) => ResidencyChange::Rewords,
        (true, false) => ResidencyChange::Narrows,
        (false, true) => ResidencyChange::Widens,
        (false, false) => ResidencyChange::NarrowsAndWidens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::parse_deployments;

    fn named(text: &str) -> BTreeMap<DeploymentName, Deployment> {
        let parsed = parse_deployments(text, &Catalogue::builtin()).unwrap();
        parsed.into_iter().map(|deployment| (deployment.name.clone(), deployment)).collect()
    }

    fn one(name: &str, more: &str) -> String {
        format!(
            "[[deployment]]\nname = \"{name}\"\ntask = \"embed\"\nmodel = \"pypi://m\"\nengine = {{ kind = \"cpu\", precision = \"f32\" }}\n{more}\n"
        )
    }

    #[test]
    fn additions_changes_and_removals_are_reported_field_by_field() {
        let catalogue = Catalogue::builtin();
        let before = named(&(one("a", "") + &one("b", "residency = { allow = [\"eu\"] }") + &one("c", "")));
        let after = named(
            &(one(
                "b",
                "residency = { allow = [\"de\"] }\nregions = [\"aws/eu-central-1\"]\nrouting = { order = [\"aws/eu-central-1\"] }",
            ) + &one("c", "")
                + &one("d", "")),
        );
        let changes = deployments(&before, &after, &catalogue);
        let summary: Vec<_> = changes.iter().map(|change| (change.name.as_str(), change.change)).collect();
        assert_eq!(
            summary,
            [("a", ChangeKind::Removed), ("b", ChangeKind::Changed), ("d", ChangeKind::Added)]
        );
        let text = |text: &str| Some(text.to_owned());
        let field = |field: &str, before, after, residency_change| FieldV1 {
            field: field.to_owned(),
            before,
            after,
            residency_change,
        };
        assert_eq!(
            changes[1].fields,
            [
                field("residency", text("eu"), text("de"), Some(ResidencyChange::Narrows)),
                field("regions", None, text("aws/eu-central-1"), None),
                field("routing.order", None, text("aws/eu-central-1"), None),
            ]
        );
        assert_eq!(changes[2].fields[1], field("model", None, text("pypi://m"), None));
        assert_eq!(deployments(&after, &after, &catalogue), []);
    }

    #[test]
    fn a_placement_in_place_of_a_list_is_reported_key_by_key() {
        let before = named(&one("a", "regions = [\"aws/eu-central-1\"]"));
        let after = named(&one("a", "placement = { min_regions = 2, max_cost = 1.5 }"));
        let changes = deployments(&before, &after, &Catalogue::builtin());
        let mut fields: Vec<_> = changes[0]
            .fields
            .iter()
            .map(|field| (field.field.as_str(), field.before.as_deref(), field.after.as_deref()))
            .collect();
        fields.sort_unstable();
        let expected = [
            ("placement.max_cost", None, Some("1.5")),
            ("placement.min_regions", None, Some("2")),
            ("regions", Some("aws/eu-central-1"), None),
        ];
        assert_eq!(fields, expected);
    }

    #[test]
    fn a_tenant_change_is_reported_without_its_keys() {
        let catalogue = Catalogue::builtin();
        let read = |more: &str| {
            let text = format!("[[tenant]]\nname = \"acme\"\n{more}");
            regions::parse_tenants(&text, &catalogue).unwrap()
        };
        let key = |digit: &str| format!("key_sha256 = [\"{}\"]\n", digit.repeat(64));
        let before = read(&(key("a") + "residency = { allow = [\"eu\"] }\nweight = 2\n"));
        let after = read(&(key("b") + "deployments = [\"minilm\"]\nweight = 2\n"));
        let changes = tenants(&before, &after, &catalogue);
        assert_eq!((changes[0].kind, changes[0].change), (Kind::Tenant, ChangeKind::Changed));
        let text = |text: &str| Some(text.to_owned());
        let field = |field: &str, before, after, residency_change| FieldV1 {
            field: field.to_owned(),
            before,
            after,
            residency_change,
        };
        assert_eq!(
            changes[0].fields,
            [
                field("key_sha256", text("aaaaaaaaaaaa"), text("bbbbbbbbbbbb"), None),
                field("deployments", text("all"), text("minilm"), None),
                field("residency", text("eu"), text("anywhere"), Some(ResidencyChange::Widens)),
            ]
        );
        assert_eq!(tenants(&after, &after, &catalogue), []);
    }

    #[test]
    fn a_policy_change_is_classified_by_its_effect() {
        let check = |before: &str, after: &str, expected: ResidencyChange| {
            let (before, after) = (before.parse().unwrap(), after.parse().unwrap());
            assert_eq!(
                residency_change(&before, &after, &Catalogue::builtin()),
                expected,
                "{before} {after}"
            );
        };
        check("anywhere", "eu", ResidencyChange::Narrows);
        check("eu", "anywhere", ResidencyChange::Widens);
        check("eu,us", "eu,jp", ResidencyChange::NarrowsAndWidens);
        check("eu", "eu,de", ResidencyChange::Rewords);
    }
}
