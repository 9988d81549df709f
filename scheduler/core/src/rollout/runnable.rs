//! Deployments that no region can run: their engine is available in none of their regions.
//!
//! The catalogue states which engines a region may have; a spoke states in its registration which ones its replicas can
//! run. A deployment that none of its registered regions can run is refused when it is applied, because its replicas
//! could never start. A spoke that does not know its engines (of an earlier version, or with replicas that another
//! system starts) counts as able to run it. While none of its regions is registered, a deployment is accepted.

use std::collections::{BTreeMap, BTreeSet};

use regions::{Catalogue, Deployment, EngineKind, RegionId};

use super::status::runs_in;
use crate::registry::RegisteredSpoke;

/// Returns why none of its registered regions can run a deployment; `None` if one can, or if none is registered.
pub fn unavailable_engine(
    deployment: &Deployment,
    spokes: &[RegisteredSpoke],
    catalogue: &Catalogue,
) -> Option<String> {
    // By region; `None` if a spoke of it does not know.
    let mut available: BTreeMap<&RegionId, Option<BTreeSet<EngineKind>>> = BTreeMap::new();
    for spoke in spokes.iter().map(|spoke| &spoke.registration) {
        if runs_in(deployment, &spoke.region, catalogue) {
            let known = available.entry(&spoke.region).or_insert_with(|| Some(BTreeSet::new()));
            *known = known.take().zip(spoke.engines.as_ref()).map(|(mut known, engines)| {
                known.extend(engines);
                known
            });
        }
    }
    let kind = deployment.engine.kind;
    let cannot = |engines: &Option<BTreeSet<EngineKind>>| {
        engines.as_ref().is_some_and(|engines| !engines.contains(&kind))
    };
    if available.is_empty() || !available.values().all(cannot) {
        return None;
    }
    let listed = available.iter().map(|(region, engines)| {
        let engines: Vec<_> = engines.iter().flatten().map(ToString::to_string).collect();
        format!("{region} has {}", if engines.is_empty() { "none".to_owned() } else { engines.join(" and ") })
    });
    let listed_in = if deployment.placement.is_some() { "" } else { " and list it in `regions`" };
    Some(format!(
        "engine.kind of `{}` is \"{kind}\", which none of its registered regions can run: {}; use an engine that one of them \
         has, or register a region with \"{kind}\"{listed_in}",
        deployment.name,
        listed.collect::<Vec<_>>().join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::some_registration;
    use regions::parse_deployments;
    use scheduler_api::registration::Registration;

    const EUROPE: &str = "gcp/europe-west4";
    const AMERICA: &str = "aws/us-east-1";

    fn spoke(region: &str, engines: Option<&[EngineKind]>) -> RegisteredSpoke {
        let registration = Registration {
            engines: engines.map(|engines| engines.iter().copied().collect()),
            ..some_registration(region)
        };
        RegisteredSpoke { registration, created: 1 }
    }

    fn problem(more: &str, spokes: &[RegisteredSpoke]) -> Option<String> {
        let catalogue = Catalogue::builtin();
        let text = format!(
            "[[deployment]]\nname = \"m\"\ntask = \"embed\"\nmodel = \"pypi://m\"\nengine = {{ kind = \"cpu\", precision = \"f32\" }}\n{more}"
        );
        unavailable_engine(&parse_deployments(&text, &catalogue).unwrap()[0], spokes, &catalogue)
    }

    const GPU: &[EngineKind] = &[EngineKind::TensorrtLlm];
    const BOTH: &[EngineKind] = &[EngineKind::Cpu, EngineKind::TensorrtLlm];

    #[test]
    fn a_deployment_is_refused_only_if_every_registered_region_states_other_engines() {
        assert_eq!(problem("", &[]), None, "nothing is registered yet");
        assert_eq!(problem("", &[spoke(AMERICA, None)]), None, "an earlier version");
        assert_eq!(problem("", &[spoke(AMERICA, Some(GPU)), spoke(EUROPE, Some(BOTH))]), None, "Europe can");
        assert_eq!(
            problem("", &[spoke(AMERICA, Some(GPU)), spoke(AMERICA, None)]),
            None,
            "one may know more"
        );
        let refused = problem("", &[spoke(AMERICA, Some(GPU)), spoke(EUROPE, Some(&[]))]).unwrap();
        let parts =
            ["engine.kind of `m` is \"cpu\"", "aws/us-east-1 has tensorrt-llm", "gcp/europe-west4 has none"];
        for part in parts {
            assert!(refused.contains(part), "{part} in {refused}");
        }
    }

    #[test]
    fn a_deployment_with_a_placement_is_not_told_to_list_its_regions() {
        let spokes = [spoke(AMERICA, Some(GPU))];
        let [listed, placed] =
            ["", "placement = { min_regions = 1 }"].map(|more| problem(more, &spokes).unwrap());
        assert!(listed.ends_with("register a region with \"cpu\" and list it in `regions`"), "{listed}");
        assert!(placed.ends_with("register a region with \"cpu\""), "{placed}");
    }

    #[test]
    fn only_the_regions_of_the_deployment_count() {
        let spokes = [spoke(AMERICA, Some(BOTH)), spoke(EUROPE, Some(GPU))];
        assert_eq!(problem("", &spokes), None);
        let refused = problem("residency = { allow = [\"eu\"] }", &spokes).unwrap();
        assert!(refused.contains(EUROPE) && !refused.contains(AMERICA), "{refused}");
        assert_eq!(
            problem("residency = { allow = [\"eu\"] }", &spokes[..1]),
            None,
            "Europe is not registered"
        );
    }
}
