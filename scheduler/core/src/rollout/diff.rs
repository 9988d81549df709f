//! The difference between what there is and what an operator wants, in the words of the files.

use std::collections::{BTreeMap, BTreeSet};

use regions::{Catalogue, Deployment, DeploymentName, EngineSpec, ResidencyPolicy, Scaling};

use crate::wire::apply::{ChangeV1, FieldV1, LawChange, What};

/// What becomes of each deployment, in the order of names; one that stays as it is is left out.
pub fn deployments(
    before: &BTreeMap<DeploymentName, Deployment>,
    after: &BTreeMap<DeploymentName, Deployment>,
    catalogue: &Catalogue,
) -> Vec<ChangeV1> {
    let names: BTreeSet<_> = before.keys().chain(after.keys()).collect();
    names.into_iter().filter_map(|name| change(name, before.get(name), after.get(name), catalogue)).collect()
}

fn change(
    name: &DeploymentName,
    before: Option<&Deployment>,
    after: Option<&Deployment>,
    catalogue: &Catalogue,
) -> Option<ChangeV1> {
    let change = match (before, after) {
        (None, _) => What::Added,
        (_, None) => What::Removed,
        (Some(before), Some(after)) if before == after => return None,
        (Some(_), Some(_)) => What::Changed,
    };
    let (was, is) = (before.map(fields).unwrap_or_default(), after.map(fields).unwrap_or_default());
    let gone = was.iter().filter(|(field, _)| !is.iter().any(|(there, _)| there == field));
    let names = is.iter().chain(gone).map(|(field, _)| field.as_str());
    let law = before.zip(after).map(|(before, after)| law(&before.residency, &after.residency, catalogue));
    let field = |name: &str| FieldV1 {
        field: name.to_owned(),
        before: value(&was, name),
        after: value(&is, name),
        law: law.filter(|_| name == "residency"),
    };
    let fields = names.map(field).filter(|field| field.before != field.after).collect();
    Some(ChangeV1 { name: name.to_string(), change, fields })
}

fn value(fields: &[(String, Option<String>)], wanted: &str) -> Option<String> {
    fields.iter().find(|(field, _)| *field == wanted).and_then(|(_, value)| value.clone())
}

/// The fields beside the name, as they are called in the file; without a value they are left out there.
fn fields(deployment: &Deployment) -> Vec<(String, Option<String>)> {
    let Deployment { name: _, task, model, engine, residency, regions, scaling } = deployment;
    let EngineSpec { kind, precision } = engine;
    let list: Vec<_> = regions.iter().map(|region| region.as_str()).collect();
    let mut fields = vec![
        ("task".to_owned(), Some(task.to_string())),
        ("model".to_owned(), Some(model.clone())),
        ("engine".to_owned(), Some(format!("{kind} {precision}"))),
        ("residency".to_owned(), Some(residency.to_string())),
        ("regions".to_owned(), (!list.is_empty()).then(|| list.join(", "))),
    ];
    if *scaling != Scaling::default() {
        fields.extend(scaling.knobs().map(|(knob, value)| (format!("scaling.{knob}"), value)));
    }
    fields
}

/// What it means for where requests may go that `before` becomes `after`.
pub fn law(before: &ResidencyPolicy, after: &ResidencyPolicy, catalogue: &Catalogue) -> LawChange {
    let (was, is) = (before.permitted(catalogue), after.permitted(catalogue));
    match (is.is_subset(&was), was.is_subset(&is)) {
        (true, true) => LawChange::Rewords,
        (true, false) => LawChange::Narrows,
        (false, true) => LawChange::Widens,
        (false, false) => LawChange::NarrowsAndWidens,
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
    fn what_is_added_changed_and_removed_is_told_field_by_field() {
        let catalogue = Catalogue::builtin();
        let before = named(&(one("a", "") + &one("b", "residency = { allow = [\"eu\"] }") + &one("c", "")));
        let after = named(
            &(one("b", "residency = { allow = [\"de\"] }\nregions = [\"aws/eu-central-1\"]")
                + &one("c", "")
                + &one("d", "")),
        );
        let changes = deployments(&before, &after, &catalogue);
        let told: Vec<_> = changes.iter().map(|change| (change.name.as_str(), change.change)).collect();
        assert_eq!(told, [("a", What::Removed), ("b", What::Changed), ("d", What::Added)]);
        let text = |text: &str| Some(text.to_owned());
        let field = |field: &str, before, after, law| FieldV1 { field: field.to_owned(), before, after, law };
        assert_eq!(
            changes[1].fields,
            [
                field("residency", text("eu"), text("de"), Some(LawChange::Narrows)),
                field("regions", None, text("aws/eu-central-1"), None),
            ]
        );
        assert_eq!(changes[2].fields[1], field("model", None, text("pypi://m"), None));
        assert_eq!(deployments(&after, &after, &catalogue), []);
    }

    #[test]
    fn a_change_of_law_is_called_what_it_is() {
        let check = |before: &str, after: &str, expected: LawChange| {
            let (before, after) = (before.parse().unwrap(), after.parse().unwrap());
            assert_eq!(law(&before, &after, &Catalogue::builtin()), expected, "{before} {after}");
        };
        check("anywhere", "eu", LawChange::Narrows);
        check("eu", "anywhere", LawChange::Widens);
        check("eu,us", "eu,jp", LawChange::NarrowsAndWidens);
        check("eu", "eu,de", LawChange::Rewords);
    }
}
