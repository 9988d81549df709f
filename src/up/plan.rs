//! Validated options of `meridian up`: regions, deployments, and the replicas that each region needs.

use crate::cli::StoreKind;
use loadtest::drill::{LOCAL_HUBS_MAX, LOCAL_REGIONS_MAX, LOCAL_SPOKES_MAX};
use regions::catalogue::Catalogue;
use regions::deployment::{self, Deployment};
use regions::geography::GeoPoint;
use regions::id::RegionId;
use regions::latency::prior_rtt;
use regions::{EngineSpec, Task};
use scheduler_core::placement::check_feasible;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Regions that `--regions N` selects the first N of: one from each part of the world, then a second round.
const DEFAULT_REGIONS: [&str; LOCAL_REGIONS_MAX] = [
    "aws/us-east-1",
    "gcp/europe-west4",
    "oci/ap-tokyo-1",
    "azure/southeastasia",
    "aws/sa-east-1",
    "gcp/australia-southeast1",
    "oci/af-johannesburg-1",
    "azure/centralindia",
    "aws/us-west-2",
    "gcp/europe-north1",
    "oci/ca-toronto-1",
    "azure/uksouth",
];

/// Maximum replicas that a spoke may start on one machine, and size of its port range: more would only compete for the CPU.
/// All spokes have this many ports, whatever the file needs, because further deployments may be applied later.
pub(super) const SPAWNED_MAX: u16 = 32;

/// Deployments of a fleet, also of a drill, whose options name no file.
pub(crate) const DEPLOYMENTS: &str = include_str!("../../configs/deployments.toml");

/// Scripted replicas, which replace the deployed ones.
pub(crate) struct ScriptedReplicas {
    /// Throughput of each replica.
    pub inputs_per_second: u32,
    /// Number of replicas in each region, in the order of the regions.
    pub replicas: Vec<u32>,
}

/// Validated plan of a local fleet.
pub(crate) struct FleetPlan {
    pub catalogue: Catalogue,
    pub catalogue_file: Option<PathBuf>,
    pub regions: Vec<RegionId>,
    pub deployments: Vec<Deployment>,
    pub deployments_text: String,
    /// Whether a deployment of the file has `scaling`. One that is equal to the default counts too.
    pub has_scaling: bool,
    /// Number of hubs.
    pub hubs: usize,
    /// Number of spokes in each region.
    pub spokes: usize,
    /// Number of gateways, near the first regions.
    pub gateways: usize,
    /// Scripted replicas, if they replace the deployed ones.
    pub scripted: Option<ScriptedReplicas>,
}

impl FleetPlan {
    /// Validates the options.
    ///
    /// # Errors
    ///
    /// All problems at once.
    pub(crate) fn check(options: &crate::cli::UpOptions) -> Result<FleetPlan, Vec<String>> {
        let mut problems = Vec::new();
        let catalogue = match &options.catalogue {
            None => Some(Catalogue::builtin()),
            Some(file) => read(file, &mut problems).and_then(|text| {
                Catalogue::parse(&text)
                    .map_err(|found| problems.extend(configuration::named(file, found)))
                    .ok()
            }),
        };
        if options.key.trim().is_empty() {
            problems.push("--key is empty; give the key that clients send, as --key local".to_owned());
        }
        match (options.hubs, options.store) {
            (1, _) | (2..=LOCAL_HUBS_MAX, StoreKind::Etcd) => {}
            (2..=LOCAL_HUBS_MAX, StoreKind::Embedded) => problems
                .push(format!("--hubs {}: several hubs need a shared store; add --store etcd", options.hubs)),
            (hubs, _) => problems.push(format!("--hubs {hubs} is out of range; write 1 to {LOCAL_HUBS_MAX}")),
        }
        match options.gateways {
            Some(0) => problems.push("--gateways 0 is out of range; write at least 1".to_owned()),
            Some(gateways) if gateways > 1 && options.ipv6 => problems.push(format!(
                "--gateways {gateways}: links distinguish gateways by their loopback address, and IPv6 has one; remove --ipv6, or \
                 write --gateways 1"
            )),
            Some(_) | None => {}
        }
        if !(1..=LOCAL_SPOKES_MAX).contains(&options.spokes) {
            problems
                .push(format!("--spokes {} is out of range; write 1 to {LOCAL_SPOKES_MAX}", options.spokes));
        }
        let Some(catalogue) = catalogue else {
            return Err(problems);
        };
        let regions = select_regions(&options.regions, &catalogue)
            .map_err(|found| problems.extend(found))
            .unwrap_or_default();
        let (name, text) = match &options.deployments {
            None => ("configs/deployments.toml".to_owned(), Some(DEPLOYMENTS.to_owned())),
            Some(file) => (file.display().to_string(), read(file, &mut problems)),
        };
        let text = text.unwrap_or_default();
        let deployments = deployment::parse_deployments(&text, &catalogue)
            .map_err(|found| problems.extend(configuration::named(Path::new(&name), found)))
            .unwrap_or_default();
        let here = regions.iter().filter_map(|region| catalogue.index_of(region)).collect();
        for deployment in deployments.iter().filter(|_| !regions.is_empty()) {
            if let Err((key, problem)) = check_feasible(deployment, &catalogue, here, &BTreeMap::new()) {
                problems.push(format!(
                    "{name}: {} among the regions of this fleet: {key}: {problem}",
                    deployment.name
                ));
            }
        }
        let gateways = match (options.gateways, options.ipv6) {
            (None, true) => 1,
            (None, false) => regions.len(),
            (Some(gateways), _) => gateways as usize,
        };
        if gateways > regions.len() && !regions.is_empty() {
            problems.push(format!(
                "--gateways {gateways}: there is one near each region at most; write 1 to {}",
                regions.len()
            ));
        }
        if problems.is_empty() {
            let catalogue_file = options.catalogue.as_ref().and_then(|file| file.canonicalize().ok());
            Ok(FleetPlan {
                catalogue,
                catalogue_file,
                regions,
                deployments,
                has_scaling: has_scaling(&text),
                deployments_text: text,
                hubs: options.hubs as usize,
                spokes: options.spokes as usize,
                gateways,
                scripted: None,
            })
        } else {
            Err(problems)
        }
    }

    /// Returns the models that must be in the cache, each once.
    pub(crate) fn models(&self) -> Vec<&str> {
        if self.scripted.is_some() {
            return Vec::new();
        }
        let mut models: Vec<_> =
            self.deployments.iter().map(|deployment| deployment.model.as_str()).collect();
        models.sort_unstable();
        models.dedup();
        models
    }

    /// Returns the deployments that `region` may serve, by model, task and engine: one replica for each key.
    pub(crate) fn replicas(&self, region: &RegionId) -> BTreeMap<(&str, Task, EngineSpec), Vec<&Deployment>> {
        let index = self.catalogue.index_of(region).expect("a planned region is in the catalogue");
        let mut replicas: BTreeMap<_, Vec<&Deployment>> = BTreeMap::new();
        for deployment in &self.deployments {
            let allowed = deployment
                .residency
                .permitted(&self.catalogue)
                .intersect(deployment.placement(&self.catalogue));
            if allowed.contains(index)
                && self.catalogue.region(index).engines.contains(&deployment.engine.kind)
            {
                replicas
                    .entry((deployment.model.as_str(), deployment.task, deployment.engine))
                    .or_default()
                    .push(deployment);
            }
        }
        replicas
    }

    /// Returns whether the fleet is autoscaled, which one deployment with `scaling` suffices for. Then spokes start and stop
    /// all replicas: if both `up` and the spoke started replicas, neither would know their number.
    pub(crate) fn is_autoscaled(&self) -> bool {
        self.scripted.is_none() && self.has_scaling
    }

    /// Returns the regions near which there is a gateway.
    pub(crate) fn gateway_regions(&self) -> &[RegionId] {
        &self.regions[..self.gateways]
    }

    /// Returns the gateway for callers near a region, by index: the nearest one, as a client finds it by anycast or DNS.
    pub(crate) fn nearest_gateway(&self, region: &RegionId) -> usize {
        let distance = |gateway: &&RegionId| self.point(gateway).distance_km(self.point(region));
        let gateways = self.gateway_regions().iter().enumerate();
        let nearest = gateways.min_by(|(_, a), (_, b)| distance(a).total_cmp(&distance(b)));
        nearest.map_or(0, |(index, _)| index)
    }

    /// Returns the location of a region.
    pub(crate) fn point(&self, region: &RegionId) -> GeoPoint {
        self.catalogue.get(region).expect("a planned region is in the catalogue").point
    }

    /// Returns the distance between two regions in kilometres, and the round trip over it.
    pub(crate) fn distance(&self, one: &RegionId, other: &RegionId) -> (f64, Duration) {
        let distance_km = self.point(one).distance_km(self.point(other));
        (distance_km, prior_rtt(distance_km))
    }
}

/// Returns whether a deployment of a file has `scaling`, which its parsed form does not tell from the default.
fn has_scaling(text: &str) -> bool {
    let file = text.parse::<toml::Table>().ok();
    let deployments = file.as_ref().and_then(|file| file.get("deployment")?.as_array());
    deployments.into_iter().flatten().any(|deployment| deployment.get("scaling").is_some())
}

fn select_regions(text: &str, catalogue: &Catalogue) -> Result<Vec<RegionId>, Vec<String>> {
    let regions = match text.trim().parse::<usize>() {
        Ok(count) if (1..=LOCAL_REGIONS_MAX).contains(&count) => return Ok(first(count)),
        Ok(count) => {
            return Err(vec![format!(
                "--regions {count} is out of range; write 1 to {LOCAL_REGIONS_MAX}, or a list of regions"
            )]);
        }
        Err(_) => regions::region_list::parse_region_list(text, catalogue),
    };
    match regions {
        Ok(regions) if regions.len() > LOCAL_REGIONS_MAX => Err(vec![format!(
            "--regions lists {} regions; one machine supports at most {LOCAL_REGIONS_MAX}",
            regions.len()
        )]),
        Ok(regions) => Ok(regions),
        Err(problems) => Err(problems.into_iter().map(|problem| format!("--regions: {problem}")).collect()),
    }
}

fn first(count: usize) -> Vec<RegionId> {
    DEFAULT_REGIONS
        .iter()
        .take(count)
        .map(|id| id.parse().expect("the default regions are well formed"))
        .collect()
}

fn read(file: &Path, problems: &mut Vec<String>) -> Option<String> {
    std::fs::read_to_string(file)
        .map_err(|error| problems.push(format!("{} cannot be read: {error}", file.display())))
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use regions::colour::RegionColour;
    use std::collections::BTreeSet;

    fn check(arguments: &[&str]) -> Result<FleetPlan, Vec<String>> {
        let typed = ["meridian", "up"].iter().chain(arguments);
        match crate::cli::Cli::parse_from(typed).command {
            crate::cli::CliCommand::Up(options) => FleetPlan::check(&options),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_default_region_is_in_the_catalogue_and_serves_a_deployment() {
        let plan = check(&["--regions", "12"]).map_err(|problems| problems.join("\n")).unwrap();
        assert_eq!(plan.regions.len(), LOCAL_REGIONS_MAX);
        assert!(plan.regions.iter().all(|region| !plan.replicas(region).is_empty()));
    }

    #[test]
    fn default_regions_and_those_of_the_shipped_drills_have_different_colours() {
        let catalogue = Catalogue::builtin();
        let mut regions: BTreeSet<_> = first(LOCAL_REGIONS_MAX).into_iter().collect();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/drills");
        for entry in std::fs::read_dir(&folder).unwrap() {
            let file = entry.unwrap().path();
            if file.extension().is_some_and(|extension| extension == "toml") {
                let text = std::fs::read_to_string(&file).unwrap();
                let drill = configuration::ConfigFile::read(&text, |document| {
                    crate::drill::read_document(document, &folder, &catalogue, false)
                });
                let drill = drill.unwrap_or_else(|problems| panic!("{}: {problems:?}", file.display()));
                regions.extend(drill.fleet.regions);
            }
        }
        assert!(regions.len() > LOCAL_REGIONS_MAX, "the drills have further regions: {regions:?}");
        for shade in [|colour: RegionColour| colour.light, |colour: RegionColour| colour.dark] {
            let mut regions_by_shade = BTreeMap::new();
            for region in &regions {
                if let Some(other) = regions_by_shade.insert(shade(regions::colour::of(region)), region) {
                    panic!("{region} has the colour of {other}");
                }
            }
        }
    }

    #[test]
    fn a_replica_serves_only_deployments_that_its_region_may_serve() {
        let plan = check(&[]).map_err(|problems| problems.join("\n")).unwrap();
        let names = |region: &str| -> Vec<String> {
            let replicas = plan.replicas(&region.parse().unwrap());
            replicas.values().flatten().map(|deployment| deployment.name.to_string()).collect()
        };
        assert_eq!(names("gcp/europe-west4"), ["minilm", "minilm-eu"]);
        assert_eq!(names("oci/ap-tokyo-1"), ["minilm"]);
    }

    #[test]
    fn the_fleet_is_autoscaled_if_one_deployment_has_scaling() {
        let check = |scaling: &str, is_autoscaled: bool| {
            let file = tempfile::NamedTempFile::new().unwrap();
            let one = "[[deployment]]\nname = \"a\"\ntask = \"embed\"\nmodel = \"pypi://m\"\n\
                       engine = { kind = \"cpu\", precision = \"f32\" }\n";
            std::fs::write(file.path(), format!("{one}{scaling}")).unwrap();
            let plan = check(&["--regions", "1", "--deployments", file.path().to_str().unwrap()]);
            let plan = plan.map_err(|problems| problems.join("\n")).unwrap();
            assert_eq!(plan.is_autoscaled(), is_autoscaled, "{scaling}");
        };
        check("", false);
        check("# scaling = { min = 0 }", false);
        check("scaling = { min = 0, max = 3 }", true);
        // The default, written out.
        check("scaling = { min = 1, max = 1 }", true);
        check("[deployment.scaling]\nmin = 1", true);
    }

    #[test]
    fn all_problems_of_the_options_are_reported_at_once() {
        let problems =
            check(&["--regions", "aws/us-east-1,aws/us-east-1,aws/atlantis-1,tokyo", "--key", " "])
                .err()
                .expect("four problems")
                .join("\n");
        for expected in ["us-east-1", "aws/atlantis-1", "tokyo", "--key"] {
            assert!(problems.contains(expected), "{expected} in {problems}");
        }
        assert!(check(&["--regions", "0"]).is_err());
        assert!(check(&["--regions", "13"]).is_err());
        assert!(check(&["--regions", ""]).is_err());
    }

    #[test]
    fn the_number_of_spokes_per_region_is_limited() {
        let problem = |arguments: &[&str]| check(arguments).err().map(|problems| problems.join("\n"));
        assert_eq!(check(&["--spokes", "2"]).map(|plan| plan.spokes), Ok(2));
        for spokes in ["0", "5"] {
            assert!(
                problem(&["--spokes", spokes]).expect("out of range").contains("write 1 to 4"),
                "{spokes}"
            );
        }
    }

    #[test]
    fn each_region_has_a_gateway_unless_fewer_are_asked_for() {
        let plan = |arguments: &[&str]| check(arguments).map_err(|problems| problems.join("\n"));
        let gateways = |arguments: &[&str]| plan(arguments).map(|plan| plan.gateways);
        assert_eq!((gateways(&[]), gateways(&["--gateways", "2"])), (Ok(3), Ok(2)));
        assert_eq!(gateways(&["--ipv6"]), Ok(1), "IPv6 has one loopback address");
        for (arguments, part) in [
            (&["--gateways", "0"][..], "at least 1"),
            (&["--gateways", "4"], "write 1 to 3"),
            (&["--gateways", "2", "--ipv6"], "remove --ipv6"),
        ] {
            assert!(gateways(arguments).is_err_and(|problem| problem.contains(part)), "{arguments:?}");
        }
        let two =
            plan(&["--gateways", "2", "--regions", "aws/us-east-1,oci/ap-tokyo-1,gcp/europe-west4"]).unwrap();
        let nearest = |region: &str| two.nearest_gateway(&region.parse().unwrap());
        assert_eq!(
            (nearest("oci/ap-tokyo-1"), nearest("gcp/europe-west4"), nearest("aws/us-east-1")),
            (1, 0, 0)
        );
    }

    #[test]
    fn several_hubs_need_a_shared_store() {
        let problem = |arguments: &[&str]| check(arguments).err().map(|problems| problems.join("\n"));
        assert_eq!(problem(&["--hubs", "5", "--store", "etcd"]), None);
        assert!(problem(&["--hubs", "2"]).is_some_and(|problem| problem.contains("--store etcd")));
        assert!(
            problem(&["--hubs", "6", "--store", "etcd"]).is_some_and(|problem| problem.contains("1 to 5"))
        );
        assert!(problem(&["--hubs", "0"]).is_some_and(|problem| problem.contains("1 to 5")));
    }

    #[test]
    fn a_catalogue_with_coordinates_out_of_range_is_rejected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let moved = include_str!("../../configs/regions.toml").replacen("at = [-33.92,", "at = [-93.92,", 1);
        std::fs::write(file.path(), moved).unwrap();
        let problems =
            check(&["--catalogue", file.path().to_str().unwrap()]).err().expect("out of range").join("\n");
        assert!(problems.contains("-93.92"), "{problems}");
    }
}
