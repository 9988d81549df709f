//! Tests of placements through a sequence of tables.

use super::*;
use crate::fixtures::some_registration;
use crate::placement::{
    Infeasible, MIN_DWELL, PlacementCost, PlacementRejection, PlacementVerdict, Placements,
    RegisteredAccelerators, check_feasible, notes, parse_deployments, report,
};
use crate::some_instant;
use regions::RouteTable;
use scheduler_api::placements::DecidedPlacements;
use scheduler_api::plan::{CandidateStateV1, ReplicaCount, ReplicaPool};

use std::time::{Duration, Instant};

type Deployments = BTreeMap<DeploymentName, Deployment>;

const A: &str = "x/a";
const B: &str = "x/b";
const C: &str = "x/c";

/// Fleet whose regions register, report replicas and go, one table after another.
struct FleetTest {
    catalogue: Catalogue,
    desired: Deployments,
    spokes: BTreeMap<RegionId, Option<Registration>>,
    /// Last registrations of lapsed spokes.
    lapsed: BTreeMap<RegionId, Registration>,
    drains: BTreeSet<RegionId>,
    in_doubt: bool,
    last: RouteTable,
    placements: Placements,
    now: Instant,
}

fn catalogue(prices: [&str; 3]) -> Catalogue {
    let rows = [("a", "de"), ("b", "fr"), ("c", "us")]
        .map(|(name, code)| format!("{name} = {{ in = \"{code}\", at = [50, 8], city = \"{name}\" }}\n"));
    let offers = [A, B, C].into_iter().zip(prices).map(|(region, price)| {
        format!("[[accelerators]]\ntype = \"l4\"\nregions = [\"{region}\"]\ncount = 4\nprice = {price}\n")
    });
    let text = format!(
        "[unions]\neu = [\"de\", \"fr\"]\n[regions.x]\n{}{}",
        rows.concat(),
        offers.collect::<String>()
    );
    Catalogue::parse(&text).unwrap()
}

fn deployment(catalogue: &Catalogue, placement: &str, more: &str) -> Deployment {
    let text = format!(
        "[[deployment]]\nname = \"m\"\ntask = \"embed\"\nmodel = \"hf://a/b\"\n\
         engine = {{ kind = \"tensorrt-llm\", precision = \"fp8\" }}\nplacement = {{ {placement} }}\n{more}\n"
    );
    regions::parse_deployments(&text, catalogue).unwrap().remove(0)
}

impl FleetTest {
    fn new(prices: [&str; 3], placement: &str, more: &str) -> FleetTest {
        let catalogue = catalogue(prices);
        let deployment = deployment(&catalogue, placement, more);
        FleetTest {
            desired: BTreeMap::from([(deployment.name.clone(), deployment)]),
            catalogue,
            spokes: BTreeMap::new(),
            lapsed: BTreeMap::new(),
            drains: BTreeSet::new(),
            in_doubt: false,
            last: RouteTable::empty(),
            placements: Placements::default(),
            now: some_instant(),
        }
    }

    fn register(&mut self, region: &str) {
        self.spokes.insert(region.parse().unwrap(), Some(some_registration(region)));
    }

    /// The region reports this many ready replicas.
    fn ready(&mut self, region: &str, ready: u32) {
        let spoke = self.spokes.get_mut(region).unwrap().as_mut().unwrap();
        let name: DeploymentName = "m".parse().unwrap();
        spoke.deployments = BTreeSet::from([name.clone()]);
        let deployments = BTreeMap::from([(name, ReplicaCount { ready, max: 4 })]);
        spoke.capacity.pools = vec![ReplicaPool { ready, tokens_per_second: 0, deployments }];
    }

    fn fleet(&self) -> Fleet<'_> {
        let regions = self.spokes.iter().map(|(region, spoke)| (region, spoke.as_ref())).collect();
        let FleetTest { catalogue, drains, in_doubt, .. } = self;
        Fleet { catalogue, regions, lapsed: self.lapsed.iter().collect(), drains, in_doubt: *in_doubt }
    }

    /// Publishes the next table and returns the regions of the deployment; `None` if it is not in the table.
    fn publish(&mut self) -> Option<Vec<String>> {
        let mut placements = std::mem::take(&mut self.placements);
        placements.tick(self.now);
        let deployments = placements.stage(&self.desired, &self.last, &self.fleet(), self.now).clone();
        self.last.deployments = deployments;
        self.placements = placements;
        self.last.deployments.get("m").map(|known| known.regions.iter().map(ToString::to_string).collect())
    }

    fn infeasible(&self) -> &BTreeMap<DeploymentName, Infeasible> {
        self.placements.infeasible()
    }

    /// The spokes of the region lapse.
    fn lapse(&mut self, region: &str) {
        let (region, spoke) = self.spokes.get_key_value(region).unwrap();
        self.lapsed.insert(region.clone(), spoke.clone().unwrap());
        self.spokes.insert(region.clone(), None);
    }

    fn state(&self, region: &str) -> CandidateStateV1 {
        let decided = self.placements.decided(&self.desired, &self.catalogue);
        let report = report(self.desired.values(), &self.last, &decided, &self.fleet());
        report[0].regions.iter().find(|candidate| candidate.region == region).unwrap().state
    }
}

fn list(regions: &[&str]) -> Option<Vec<String>> {
    Some(regions.iter().map(|region| (*region).to_owned()).collect())
}

#[test]
fn a_deployment_is_served_once_enough_regions_have_a_spoke() {
    let mut test = FleetTest::new(["1", "2", "3"], "accelerator = \"l4\", min_regions = 2", "");
    assert_eq!(test.publish(), None);
    test.register(B);
    assert_eq!(test.publish(), None);
    let constraint = Infeasible::Regions { eligible: 1, candidates: 1, min_regions: 2 };
    assert_eq!(test.infeasible().values().collect::<Vec<_>>(), [&constraint]);
    test.register(C);
    assert_eq!(test.publish(), list(&[B, C]));
    assert!(test.infeasible().is_empty());
}

#[test]
fn a_region_leaves_only_when_the_new_ones_are_ready() {
    let mut test = FleetTest::new(
        ["1", "2", "3"],
        "accelerator = \"l4\", min_regions = 2",
        "scaling = { min = 2, max = 4 }",
    );
    for region in [B, C] {
        test.register(region);
        test.ready(region, 2);
    }
    assert_eq!(test.publish(), list(&[B, C]));
    test.register(A);
    assert_eq!(test.publish(), list(&[A, B, C]), "the cheaper region starts replicas");
    assert_eq!(test.state(C), CandidateStateV1::Leaving);
    test.ready(A, 1);
    assert_eq!(test.publish(), list(&[A, B, C]), "one of two replicas is ready");
    test.ready(A, 2);
    assert_eq!(test.publish(), list(&[A, B]));
    assert_eq!((test.state(A), test.state(C)), (CandidateStateV1::Chosen, CandidateStateV1::NotNeeded));
    assert_eq!(test.publish(), list(&[A, B]));
}

#[test]
fn changed_prices_move_a_deployment_only_beyond_the_margin() {
    let mut test = FleetTest::new(["1.00", "1.00", "1.00"], "accelerator = \"l4\", min_regions = 2", "");
    for region in [A, B, C] {
        test.register(region);
        test.ready(region, 1);
    }
    assert_eq!(test.publish(), list(&[A, B]));
    test.catalogue = catalogue(["1.04", "0.98", "0.96"]);
    assert_eq!(test.publish(), list(&[A, B]));
    test.catalogue = catalogue(["1.20", "0.98", "0.96"]);
    assert_eq!(test.publish(), list(&[B, C]));
    test.catalogue = catalogue(["1.00", "1.00", "1.00"]);
    assert_eq!(test.publish(), list(&[B, C]), "no way back without a reason");
}

#[test]
fn a_region_that_residency_no_longer_permits_leaves_at_once() {
    let mut test = FleetTest::new(["2", "2", "1"], "accelerator = \"l4\", min_regions = 1", "");
    for region in [A, B, C] {
        test.register(region);
        test.ready(region, 1);
    }
    assert_eq!(test.publish(), list(&[C]));
    test.ready(A, 0);
    let narrower = deployment(
        &test.catalogue,
        "accelerator = \"l4\", min_regions = 1",
        "residency = { allow = [\"eu\"] }",
    );
    test.desired.insert(narrower.name.clone(), narrower);
    assert_eq!(test.publish(), list(&[A]), "although it has no ready replica yet");
}

#[test]
fn a_lapsed_region_stays_and_one_that_is_gone_is_replaced() {
    let mut test = FleetTest::new(["1", "1", "9"], "accelerator = \"l4\", min_regions = 2", "");
    for region in [A, B, C] {
        test.register(region);
        test.ready(region, 1);
    }
    assert_eq!(test.publish(), list(&[A, B]));
    *test.spokes.get_mut(A).unwrap() = None;
    assert_eq!(test.publish(), list(&[A, B]));
    test.in_doubt = true;
    let gone = test.spokes.remove(A);
    assert_eq!(test.publish(), list(&[A, B]), "the store is suspected");
    test.in_doubt = false;
    assert_eq!(test.publish(), list(&[B, C]));
    test.spokes.insert(A.parse().unwrap(), gone.unwrap());
    test.spokes.remove(C);
    assert_eq!(
        test.publish(),
        list(&[B, C]),
        "a lapsed region is not chosen, and the placement stays as it is"
    );
    assert_eq!(test.infeasible().len(), 1);
    assert_eq!((test.state(C), test.state(A)), (CandidateStateV1::Kept, CandidateStateV1::Rejected));
}

#[test]
fn a_deployment_without_a_list_moves_from_the_regions_that_serve_it() {
    let mut test = FleetTest::new(["1", "2", "3"], "accelerator = \"l4\", min_regions = 1", "");
    for region in [A, B, C] {
        test.register(region);
        test.ready(region, 1);
    }
    let everywhere = Deployment { placement: None, ..test.desired.values().next().unwrap().clone() };
    test.last.deployments.insert(everywhere.name.clone(), everywhere);
    test.ready(A, 0);
    assert_eq!(test.publish(), list(&[A, B, C]), "A is not ready");
    test.ready(A, 1);
    assert_eq!(test.publish(), list(&[A]));
}

#[test]
fn a_region_that_starts_no_replicas_is_chosen_only_where_it_has_one() {
    let mut test = FleetTest::new(["1", "2", "3"], "accelerator = \"l4\", min_regions = 1", "");
    for region in [A, B] {
        test.register(region);
        test.spokes.get_mut(region).unwrap().as_mut().unwrap().scales = false;
    }
    assert_eq!(test.publish(), None);
    test.ready(B, 1);
    assert_eq!(test.publish(), list(&[B]));
    assert_eq!(test.state(A), CandidateStateV1::Rejected);
}

#[test]
fn a_region_whose_spoke_states_other_engines_is_not_chosen() {
    let mut test = FleetTest::new(["1", "2", "3"], "accelerator = \"l4\", min_regions = 1", "");
    let states = |test: &mut FleetTest, region: &str, engines: &[EngineKind]| {
        let spoke = test.spokes.get_mut(region).unwrap().as_mut().unwrap();
        spoke.engines = Some(engines.iter().copied().collect());
    };
    [A, B].iter().for_each(|region| test.register(region));
    states(&mut test, A, &[EngineKind::Cpu]);
    assert_eq!(test.publish(), list(&[B]), "B states none");
    assert_eq!(test.state(A), CandidateStateV1::Rejected);
    states(&mut test, A, &[EngineKind::Cpu, EngineKind::TensorrtLlm]);
    test.last = RouteTable::empty();
    assert_eq!(test.publish(), list(&[A]));
}

#[test]
fn a_drained_region_stays_in_its_placements() {
    let mut test = FleetTest::new(["1", "2", "3"], "accelerator = \"l4\", min_regions = 1", "");
    [A, B].iter().for_each(|region| test.register(region));
    assert_eq!(test.publish(), list(&[A]));
    test.drains.insert(A.parse().unwrap());
    assert_eq!(test.publish(), list(&[A]));
    test.last = RouteTable::empty();
    assert_eq!(test.publish(), list(&[B]));
}

#[test]
fn registered_accelerators_replace_those_of_the_catalogue() {
    let mut test =
        FleetTest::new(["1", "2", "3"], "accelerator = \"l4\", min_regions = 1, max_cost = 1.5", "");
    [A, B].iter().for_each(|region| test.register(region));
    let offer = |count, price| {
        regions::Accelerators::from([(
            "l4".parse().unwrap(),
            regions::Offering { count: Some(count), price: Some(price) },
        )])
    };
    assert_eq!(test.publish(), list(&[A]));
    test.spokes.get_mut(B).unwrap().as_mut().unwrap().accelerators = offer(2, 500_000);
    test.ready(B, 1);
    assert_eq!(test.publish(), list(&[B]), "half the price");
    test.spokes.get_mut(A).unwrap().as_mut().unwrap().accelerators = offer(1, 100_000);
    test.ready(A, 1);
    assert_eq!(test.publish(), list(&[B]), "it has just moved");
    test.now += MIN_DWELL;
    assert_eq!(test.publish(), list(&[A]));

    let deployment = deployment(&test.catalogue, "accelerator = \"l4\", min_regions = 2, max_cost = 1", "");
    let none = RegisteredAccelerators::new();
    assert_eq!(
        check_feasible(&deployment, &test.catalogue, test.catalogue.all(), &none).unwrap_err().0,
        "placement.max_cost"
    );
    let registered =
        BTreeMap::from([(A.parse().unwrap(), offer(1, 100_000)), (B.parse().unwrap(), offer(2, 500_000))]);
    assert_eq!(check_feasible(&deployment, &test.catalogue, test.catalogue.all(), &registered), Ok(()));
}

#[test]
fn the_report_has_prices_cost_and_reasons() {
    let mut test = FleetTest::new(
        ["1.5", "2", "3"],
        "accelerator = \"l4\", min_regions = 1, max_cost = 4",
        "scaling = { min = 2 }",
    );
    [A, B, C].iter().for_each(|region| test.register(region));
    test.spokes.get_mut(C).unwrap().as_mut().unwrap().scales = false;
    test.publish();
    let none = DecidedPlacements::new();
    let report = report(test.desired.values(), &test.last, &none, &test.fleet()).remove(0);
    assert_eq!((report.infeasible, report.cost_millionths), (None, Some(3_000_000)));
    assert_eq!(report.max_cost_millionths, Some(4_000_000));
    let row = |at: usize| {
        let candidate = &report.regions[at];
        (
            candidate.state,
            candidate.accelerator.as_deref(),
            candidate.price_millionths,
            candidate.replicas_max,
        )
    };
    assert_eq!(row(0), (CandidateStateV1::Chosen, Some("l4"), Some(1_500_000), Some(2)));
    assert_eq!(row(1), (CandidateStateV1::NotNeeded, Some("l4"), Some(2_000_000), Some(2)));
    assert_eq!(row(2), (CandidateStateV1::Rejected, None, None, None));
    assert_eq!(report.regions[2].reason, PlacementRejection::StartsNone.to_string());
}

#[test]
fn an_infeasible_placement_of_a_file_is_rejected_with_its_constraint_and_line() {
    let catalogue = catalogue(["1", "2", "3"]);
    let check = |placement: &str, more: &str, expected: &[&str]| {
        let text = format!(
            "[[deployment]]\nname = \"m\"\ntask = \"embed\"\nmodel = \"hf://a/b\"\n\
             engine = {{ kind = \"tensorrt-llm\", precision = \"fp8\" }}\n{more}\nplacement = {{ {placement} }}\n"
        );
        let problems =
            parse_deployments(&text, &catalogue, &RegisteredAccelerators::new(), &Deployments::new())
                .err()
                .unwrap_or_default();
        assert_eq!(problems.is_empty(), expected.is_empty(), "{placement}: {problems:?}");
        for part in expected {
            let line = format!("{} {}", problems[0].line, problems[0].message);
            assert!(line.contains(part), "{line} does not contain {part}");
        }
    };
    check("accelerator = \"l4\", min_regions = 3, max_cost = 6", "", &[]);
    let eu = "residency = { allow = [\"eu\"] }";
    check(
        "accelerator = \"l4\", min_regions = 3",
        eu,
        &["7 ", "placement.min_regions: 2 of 3 regions", "requires 3", "1 because the residency"],
    );
    check(
        "accelerator = \"l4\", min_regions = 3, max_cost = 5.9",
        "",
        &["placement.max_cost", "cost 6 per", "permits 5.9"],
    );
    check(
        "accelerator = \"l4\", min_regions = 1, min_replicas = 9",
        "scaling = { max = 8 }",
        &["min_replicas", "hold 8 replicas"],
    );
    check("min_regions = 1, max_cost = 5", "", &["3 because its price is unknown"]);
    let both = "regions = [\"x/a\"]";
    check(
        "accelerator = \"l4\", min_regions = 1",
        both,
        &["7 ", "`regions` and `placement` exclude each other"],
    );
    check("accelerator = \"l5\", min_regions = 1", "", &["offers `l5`; did you mean l4?"]);
    check("accelerator = [], min_regions = 1", "", &["has 0 entries"]);
    check("accelerator = \"l4\"", "", &["min_regions: is missing"]);
    check(
        "accelerator = \"l4\", min_regions = 17",
        "",
        &["17 is out of range; write a whole number from 1 to 16"],
    );
}

#[test]
fn placements_among_all_regions_of_the_catalogue_are_the_cheapest_that_residency_permits() {
    let catalogue = Catalogue::builtin();
    let (mut placed, none) = (0, RegisteredAccelerators::new());
    for kind in catalogue.accelerator_types() {
        for residency in ["", "residency = { allow = [\"eu\"] }", "residency = { allow = [\"us\"] }"] {
            let deployment =
                deployment(&catalogue, &format!("accelerator = \"{kind}\", min_regions = 2"), residency);
            let permitted = deployment.residency.permitted(&catalogue);
            let offers: Vec<Option<u64>> = permitted
                .iter()
                .filter_map(|region| catalogue.region(region).accelerators.get(kind))
                .map(|offering| offering.price)
                .collect();
            if offers.len() < 2 {
                assert_eq!(
                    check_feasible(&deployment, &catalogue, catalogue.all(), &none).unwrap_err().0,
                    "placement.min_regions"
                );
                continue;
            }
            placed += 1;
            check_feasible(&deployment, &catalogue, catalogue.all(), &none).unwrap();
            let registrations: Vec<_> =
                catalogue.iter().map(|(_, region)| some_registration(region.id.as_str())).collect();
            let fleet = Fleet {
                catalogue: &catalogue,
                regions: registrations.iter().map(|known| (&known.region, Some(known))).collect(),
                lapsed: BTreeMap::new(),
                drains: &BTreeSet::new(),
                in_doubt: false,
            };
            let PlacementDecision { regions, cost, verdicts, .. } =
                decide(&deployment, deployment.placement.as_ref().unwrap(), RegionSet::EMPTY, None, &fleet)
                    .decision;
            assert!(regions.is_subset(&permitted) && regions.len() == 2, "{kind} {residency}");
            let mut prices: Vec<_> =
                offers.into_iter().map(|price| (price.is_none(), price.unwrap_or(0))).collect();
            prices.sort_unstable();
            let expected =
                prices[..2].iter().fold(PlacementCost::default(), |sum, (unknown, price)| PlacementCost {
                    unpriced: sum.unpriced + u32::from(*unknown),
                    millionths: sum.millionths + price,
                });
            assert_eq!(cost, Some(expected), "{kind} {residency}");
            let names: Vec<_> = regions.iter().map(|region| catalogue.region(region).id.as_str()).collect();
            let applied = BTreeMap::from([(deployment.name.clone(), deployment.clone())]);
            let noted = notes(&BTreeMap::new(), &applied, &catalogue, &none);
            assert!(noted[0].contains(&names.join(", ")), "{noted:?}");
            let rejected = |verdict: &PlacementVerdict| {
                *verdict == PlacementVerdict::Rejected(PlacementRejection::Residency)
            };
            let forbidden = catalogue.all().minus(permitted).len();
            assert_eq!(verdicts.iter().filter(|(_, verdict)| rejected(verdict)).count(), forbidden);
        }
    }
    println!("{placed} placements among {} regions", catalogue.len());
    assert!(placed >= 20, "{placed}");
}

#[test]
fn a_decision_is_repeated_only_when_its_input_changes() {
    let mut test = FleetTest::new(["1", "2", "3"], "accelerator = \"l4\", min_regions = 2", "");
    let listed = regions::parse_deployments(
        "[[deployment]]\nname = \"listed\"\ntask = \"embed\"\nmodel = \"hf://a/b\"\n\
         engine = { kind = \"tensorrt-llm\", precision = \"fp8\" }\nregions = [\"x/a\"]\n",
        &test.catalogue,
    );
    let listed = listed.unwrap().remove(0);
    test.desired.insert(listed.name.clone(), listed);
    [A, B].iter().for_each(|region| test.register(region));
    assert_eq!(test.publish(), list(&[A, B]));
    assert_eq!(test.publish(), list(&[A, B]));
    // The first decision had no current regions, the second has.
    assert_eq!((test.placements.decisions(), test.placements.revision()), (2, 1));
    let models = |test: &mut FleetTest| {
        let mut placements = std::mem::take(&mut test.placements);
        let staged = placements.stage(&test.desired, &test.last, &test.fleet(), test.now);
        let models: Vec<_> = staged.values().map(|deployment| deployment.model.as_ptr()).collect();
        test.placements = placements;
        models
    };
    let before = models(&mut test);
    test.ready(A, 1);
    test.ready(B, 3);
    assert_eq!(models(&mut test), before, "no deployment is copied");
    assert_eq!(test.placements.decisions(), 2, "the number of ready replicas changes no decision");
    test.register(C);
    assert_eq!(test.publish(), list(&[A, B]));
    assert_eq!((test.placements.decisions(), test.placements.revision()), (3, 1));
    test.desired.retain(|name, _| name.as_str() == "listed");
    assert_eq!(test.publish(), None);
    assert_eq!(test.last.deployments.len(), 1);
    assert!(test.placements.decided(&test.desired, &test.catalogue).is_empty());
}

#[test]
fn a_lapsed_region_keeps_its_registered_accelerators() {
    let mut test = FleetTest::new(["9", "2", "9"], "accelerator = \"l4\", min_regions = 1", "");
    [A, B].iter().for_each(|region| test.register(region));
    let offering = regions::Offering { count: Some(2), price: Some(1_000_000) };
    let own = regions::Accelerators::from([("l4".parse().unwrap(), offering)]);
    test.spokes.get_mut(A).unwrap().as_mut().unwrap().accelerators = own;
    test.ready(A, 1);
    test.ready(B, 1);
    assert_eq!(test.publish(), list(&[A]), "1 is cheaper than 2");
    test.lapse(A);
    assert_eq!(test.publish(), list(&[A]), "its price in the catalogue is 9");
    // A new leader does not know what the region had registered.
    (test.placements, test.lapsed) = (Placements::default(), BTreeMap::new());
    assert_eq!(test.publish(), list(&[A]));
    assert!(test.infeasible().is_empty());
    assert_eq!((test.state(A), test.state(B)), (CandidateStateV1::Kept, CandidateStateV1::NotNeeded));
    test.spokes.remove(A);
    assert_eq!(test.publish(), list(&[B]), "its route has ended");
}

#[test]
fn while_the_store_is_suspected_an_infeasible_placement_keeps_its_regions_and_stays_reported() {
    let mut test = FleetTest::new(["1", "1", "1"], "accelerator = \"l4\", min_regions = 2", "");
    [A, B].iter().for_each(|region| test.register(region));
    assert_eq!(test.publish(), list(&[A, B]));
    test.spokes.remove(B);
    assert_eq!(test.publish(), list(&[A, B]));
    let constraint = test.infeasible().clone();
    assert_eq!(constraint.len(), 1);
    test.in_doubt = true;
    test.lapse(A);
    assert_eq!((test.publish(), test.infeasible()), (list(&[A, B]), &constraint));
}

#[test]
fn a_placement_is_not_infeasible_while_it_is_unknown_what_a_current_region_had_registered() {
    let requirement = "accelerator = \"l4\", min_regions = 1, max_cost = 2";
    let mut test = FleetTest::new(["9", "9", "9"], requirement, "");
    test.register(A);
    let offering = regions::Offering { count: Some(2), price: Some(1_000_000) };
    let own = regions::Accelerators::from([("l4".parse().unwrap(), offering)]);
    test.spokes.get_mut(A).unwrap().as_mut().unwrap().accelerators = own;
    test.ready(A, 1);
    assert_eq!(test.publish(), list(&[A]));
    test.lapse(A);
    // A new leader does not know what the region had registered, and its price in the catalogue is 9.
    (test.placements, test.lapsed) = (Placements::default(), BTreeMap::new());
    assert_eq!(test.publish(), list(&[A]));
    assert!(test.infeasible().is_empty());
    assert_eq!(test.state(A), CandidateStateV1::Kept);
    test.spokes.remove(A);
    assert_eq!(test.publish(), list(&[A]), "its route has ended, and no other region is feasible");
    assert_eq!(test.infeasible().len(), 1);
}

/// Deployment that moves from A to B, whose replica is not ready yet.
fn moving() -> FleetTest {
    let requirement = "accelerator = \"l4\", min_regions = 1, max_cost = 4";
    let mut test = FleetTest::new(["2", "1", "9"], requirement, "");
    test.register(A);
    test.ready(A, 1);
    assert_eq!(test.publish(), list(&[A]));
    test.register(B);
    assert_eq!(test.publish(), list(&[A, B]));
    test
}

#[test]
fn an_infeasible_interval_is_not_a_move() {
    let mut test = moving();
    test.catalogue = catalogue(["9", "9", "9"]);
    assert_eq!(test.publish(), list(&[A, B]));
    assert_eq!(test.infeasible().len(), 1);
    test.catalogue = catalogue(["2", "1", "9"]);
    test.ready(B, 1);
    assert_eq!(test.publish(), list(&[B]), "it need not dwell in both");
}

#[test]
fn an_unknown_region_that_stays_is_not_a_move() {
    let mut test = moving();
    let registered = test.spokes.get_mut(A).unwrap().take();
    test.ready(B, 1);
    assert_eq!(test.publish(), list(&[A, B]));
    test.spokes.insert(A.parse().unwrap(), registered);
    assert_eq!(test.publish(), list(&[B]), "it need not dwell in both");
}

#[test]
fn prices_that_flap_move_a_deployment_once_in_the_dwell_time() {
    let mut test = FleetTest::new(["1", "2", "9"], "accelerator = \"l4\", min_regions = 1", "");
    for region in [A, B] {
        test.register(region);
        test.ready(region, 1);
    }
    assert_eq!(test.publish(), list(&[A]));
    test.catalogue = catalogue(["2", "1", "9"]);
    assert_eq!(test.publish(), list(&[B]));
    let moved = test.now;
    for minute in 1..60 {
        test.now = moved + Duration::from_secs(60 * minute);
        test.catalogue = catalogue(if minute % 2 == 0 { ["2", "1", "9"] } else { ["1", "2", "9"] });
        assert_eq!(test.publish(), list(&[B]), "minute {minute}");
    }
    assert_eq!(test.placements.next_due(), Some(moved + MIN_DWELL));
    assert_eq!((test.state(A), test.state(B)), (CandidateStateV1::NotNeeded, CandidateStateV1::Chosen));
    assert!(!test.placements.tick(moved + MIN_DWELL - Duration::from_secs(1)));
    assert!(test.placements.tick(moved + MIN_DWELL));
    test.now = moved + MIN_DWELL;
    assert_eq!(test.publish(), list(&[A]));
    // A lost region does not wait for the dwell time, and neither does a changed requirement.
    test.spokes.remove(A);
    assert_eq!(test.publish(), list(&[B]));
    test.register(A);
    test.ready(A, 1);
    assert_eq!(test.publish(), list(&[B]));
    let changed = deployment(&test.catalogue, "accelerator = \"l4\", min_regions = 1, max_cost = 5", "");
    test.desired.insert(changed.name.clone(), changed);
    assert_eq!(test.publish(), list(&[A]));
}

#[test]
fn an_unchanged_infeasible_placement_does_not_prevent_the_change_of_another_deployment() {
    let catalogue = catalogue(["1", "2", "3"]);
    let none = RegisteredAccelerators::new();
    let text = |name: &str, cost: &str| {
        format!(
            "[[deployment]]\nname = \"{name}\"\ntask = \"embed\"\nmodel = \"hf://a/b\"\n\
             engine = {{ kind = \"tensorrt-llm\", precision = \"fp8\" }}\n\
             placement = {{ accelerator = \"l4\", min_regions = 2, max_cost = {cost} }}\n"
        )
    };
    let named = |text: &str| {
        let deployments = regions::parse_deployments(text, &catalogue).unwrap().into_iter();
        deployments.map(|deployment| (deployment.name.clone(), deployment)).collect::<Deployments>()
    };
    // The cheapest two regions cost 3: the placement of `dear` was feasible when it was applied.
    let (dear, other) = (text("dear", "2"), text("other", "4"));
    let before = named(&dear);
    let both = dear.clone() + &other;
    assert!(parse_deployments(&both, &catalogue, &none, &before).is_ok());
    let noted = notes(&before, &named(&both), &catalogue, &none);
    assert!(noted[0].contains("the hub chooses the regions of other"), "{noted:?}");
    for part in ["1 unchanged deployments", "dear: placement.max_cost", "cost 3 per hour"] {
        assert!(noted[1].contains(part), "{part} in {noted:?}");
    }
    let changed = text("dear", "2.5") + &other;
    let problems = parse_deployments(&changed, &catalogue, &none, &before).unwrap_err();
    assert!(problems[0].message.contains("placement.max_cost"), "{problems:?}");
}
