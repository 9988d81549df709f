//! Requirements of a drill that the local fleet must meet, since a drill does not change the kind of the fleet.

use crate::cli::{StoreKind, UpOptions};
use crate::up::plan::FleetPlan;
use loadtest::drill::{Drill, DrillEngine, DrillStore};
use regions::RegionId;

/// Returns why a drill cannot be started in this fleet, with the fix; `None` if it can.
pub(super) fn unmet(drill: &Drill, options: &UpOptions, plan: &FleetPlan) -> Option<String> {
    let fleet = &drill.fleet;
    let own = match (&fleet.engine, &fleet.deployments) {
        (DrillEngine::Scripted { .. }, _) => Some("scripted replicas"),
        (DrillEngine::Cpu, Some(_)) => Some("deployments of its own"),
        (DrillEngine::Cpu, None) => None,
    };
    if let Some(own) = own {
        return Some(format!("needs {own}; `meridian drill FILE` starts a fleet that has them"));
    }
    let mut needed = Vec::new();
    if fleet.regions.iter().any(|region| !plan.regions.contains(region)) {
        let regions: Vec<_> = fleet.regions.iter().map(RegionId::as_str).collect();
        needed.push(format!("--regions {}", regions.join(",")));
    }
    if fleet.store == DrillStore::Etcd && options.store != StoreKind::Etcd {
        needed.push("--store etcd".to_owned());
    }
    if plan.hubs < fleet.hubs as usize {
        needed.push(format!("--hubs {}", fleet.hubs));
    }
    if plan.spokes < fleet.spokes as usize {
        needed.push(format!("--spokes {}", fleet.spokes));
    }
    if !needed.is_empty() {
        return Some(format!("needs `meridian up {}`", needed.join(" ")));
    }
    let is_deployed = |name| plan.deployments.iter().any(|deployment| deployment.name == name);
    let missing = drill.loads.iter().map(|load| load.model.clone()).find(|name| !is_deployed(name.clone()));
    missing.map(|name| format!("needs a deployment {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, CliCommand};
    use clap::Parser;

    #[test]
    fn all_shipped_drills_are_listed_and_each_names_the_fleet_that_it_needs() {
        let arguments = ["meridian", "up", "--regions", "aws/us-east-1,gcp/europe-west4"];
        let CliCommand::Up(options) = Cli::parse_from(arguments).command else {
            panic!("the command is up");
        };
        let plan = FleetPlan::check(&options).map_err(|problems| problems.join("\n")).unwrap();
        let listed = super::super::read(&options, &plan).map_err(|problems| problems.join("\n")).unwrap();
        assert_eq!(listed.len(), std::fs::read_dir("configs/drills").unwrap().count());
        let check = |name: &str, expected: Option<&str>| {
            let found = &listed.iter().find(|listed| listed.name == name).expect(name).unmet;
            match expected {
                None => assert_eq!(found, &None, "{name}"),
                Some(part) => assert!(found.as_ref().is_some_and(|found| found.contains(part)), "{found:?}"),
            }
        };
        check("flapping-region", None);
        check("hub-loss", None);
        check("hub-takeover", Some("`meridian up --store etcd --hubs 2`"));
        check("region-kill", Some("scripted replicas"));
        check("residency-under-outage", Some("--regions aws/us-east-1,gcp/europe-west4,oci/ap-tokyo-1"));
    }
}
