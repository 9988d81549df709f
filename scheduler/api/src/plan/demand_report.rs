//! Reports of a gateway's demand as changes of one that the hub has.
//!
//! A gateway reports every second, mostly without a change, and most of a report are the names of regions and deployments. A
//! demand that a hub has acknowledged is the base of the next report, which has only what has changed since then, so an idle
//! report does not depend on the size of the fleet. The base is named by the checksum of its content and not by a number: so
//! no state is shared between hubs, and a hub that has another demand, or none, rejects the report. The gateway then sends
//! the complete demand. It does so as well after every failed request, because the hub may have received it or not.
//!
//! A report with changes has no `classes`, which a hub that does not know changes requires: it rejects the report instead of
//! taking it for a complete one.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::super::deployment::required_option;
use super::super::{FNV_BASIS, MessageVersion, VERSION, WireError, fnv1a, parsed, present, reject_too_many};
use super::{ClassDemandV1, DemandV1, GatewayBoot, ROWS_MAX};

/// Complete reports after changes were rejected. A hub that does not know changes receives few in vain, and the
/// rejections of one that has restarted cost some seconds of complete reports.
const COMPLETE_AFTER_REJECTION: u32 = 10;

/// `POST /v1/demand`: a [`DemandV1`], or changes of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DemandReportV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Region of the gateway.
    pub gateway: String,
    /// Random number drawn at its start.
    pub boot_id: u64,
    /// Demand by class, of a complete report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<Vec<ClassDemandV1>>,
    /// Regions whose reports the gateway receives. In a report with changes, absent if they have not changed, and `null` if
    /// the gateway does not report them any more.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub reachable_regions: Option<Option<Vec<String>>>,
    /// The changes, instead of `classes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changes: Option<DemandChangesV1>,
}

/// Changes of a demand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DemandChangesV1 {
    /// Checksum of the demand that is changed.
    pub base: u64,
    /// Checksum of the result.
    pub checksum: u64,
    /// New classes, and those whose demand has changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub set: Vec<ClassDemandV1>,
    /// Classes that are not listed any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<RemovedClassV1>,
}

/// Class that is not listed any more.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RemovedClassV1 {
    /// Requested deployment.
    pub deployment: String,
    /// Residency policy of the requests; `null` allows all regions.
    #[serde(deserialize_with = "required_option")]
    pub residency: Option<String>,
    /// Origin of the requests.
    pub origin: String,
}

/// Why the demand of a report is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DemandReportError {
    /// The report is invalid.
    #[error(transparent)]
    Invalid(#[from] WireError),
    /// The hub does not have the demand that is changed, or the changes of it give another one than the gateway has.
    #[error("this hub does not have the demand that is changed; send the complete demand")]
    UnknownBase,
}

impl From<&ClassDemandV1> for RemovedClassV1 {
    fn from(class: &ClassDemandV1) -> RemovedClassV1 {
        let ClassDemandV1 { deployment, residency, origin, tokens_per_second: _ } = class.clone();
        RemovedClassV1 { deployment, residency, origin }
    }
}

impl DemandReportV1 {
    fn complete(demand: DemandV1) -> DemandReportV1 {
        let DemandV1 { version, gateway, boot_id, classes, reachable_regions } = demand;
        let reachable_regions = reachable_regions.map(Some);
        DemandReportV1 { version, gateway, boot_id, classes: Some(classes), reachable_regions, changes: None }
    }

    /// Returns the changes from `base` to `now`.
    fn changes(base: &DemandV1, now: &DemandV1) -> DemandReportV1 {
        let before: BTreeMap<RemovedClassV1, u64> = by_class(&base.classes).collect();
        let is_changed = |class: &&ClassDemandV1| {
            before.get(&RemovedClassV1::from(*class)) != Some(&class.tokens_per_second)
        };
        let set = now.classes.iter().filter(is_changed).cloned().collect();
        let after: BTreeMap<RemovedClassV1, u64> = by_class(&now.classes).collect();
        let removed = before.into_keys().filter(|class| !after.contains_key(class)).collect();
        let reachable_regions =
            (base.reachable_regions != now.reachable_regions).then(|| now.reachable_regions.clone());
        let changes = DemandChangesV1 { base: checksum(base), checksum: checksum(now), set, removed };
        DemandReportV1 {
            version: VERSION,
            gateway: now.gateway.clone(),
            boot_id: now.boot_id,
            classes: None,
            reachable_regions,
            changes: Some(changes),
        }
    }

    /// Returns the gateway.
    ///
    /// # Errors
    ///
    /// When its region is invalid.
    pub fn gateway(&self) -> Result<GatewayBoot, WireError> {
        Ok(GatewayBoot { region: parsed("gateway", &self.gateway)?, boot_id: self.boot_id })
    }

    /// Returns the demand, of which `base` is the last one that the hub has.
    ///
    /// # Errors
    ///
    /// When the report is invalid, or has changes of another demand.
    pub fn restore(self, base: Option<&DemandV1>) -> Result<DemandV1, DemandReportError> {
        let DemandReportV1 { version, gateway, boot_id, classes, reachable_regions, changes } = self;
        let (changes, base) = match (classes, changes) {
            (Some(classes), None) => {
                let reachable_regions = reachable_regions.flatten();
                return Ok(DemandV1 { version, gateway, boot_id, classes, reachable_regions });
            }
            (Some(_), Some(_)) => {
                let problem = "it excludes `classes`; send one of them".to_owned();
                return Err(WireError::new("changes", problem).into());
            }
            (None, None) => {
                let problem = "it is missing; a report without `changes` has it".to_owned();
                return Err(WireError::new("classes", problem).into());
            }
            (None, Some(changes)) => (changes, base.ok_or(DemandReportError::UnknownBase)?),
        };
        let DemandChangesV1 { base: base_checksum, checksum: expected, set, removed } = changes;
        reject_too_many("changes.set", set.len(), ROWS_MAX)?;
        reject_too_many("changes.removed", removed.len(), ROWS_MAX)?;
        if checksum(base) != base_checksum {
            return Err(DemandReportError::UnknownBase);
        }
        let mut each: BTreeMap<RemovedClassV1, u64> = by_class(&base.classes).collect();
        for class in &removed {
            each.remove(class);
        }
        each.extend(by_class(&set));
        let classes = each.into_iter().map(|(class, tokens_per_second)| {
            let RemovedClassV1 { deployment, residency, origin } = class;
            ClassDemandV1 { deployment, residency, origin, tokens_per_second }
        });
        let reachable_regions = reachable_regions.unwrap_or_else(|| base.reachable_regions.clone());
        let demand = DemandV1 { version, gateway, boot_id, classes: classes.collect(), reachable_regions };
        if checksum(&demand) == expected { Ok(demand) } else { Err(DemandReportError::UnknownBase) }
    }
}

fn by_class(classes: &[ClassDemandV1]) -> impl Iterator<Item = (RemovedClassV1, u64)> {
    classes.iter().map(|class| (RemovedClassV1::from(class), class.tokens_per_second))
}

/// Checksum of the content of a demand: a sum, so that it does not depend on an order. It detects defects, not forgery.
fn checksum(demand: &DemandV1) -> u64 {
    let of = |part: &[&[u8]]| {
        // A separator that is in no name.
        fnv1a(FNV_BASIS, part.iter().flat_map(|text| text.iter().copied().chain([0xff])))
    };
    let classes = demand.classes.iter().map(|class| {
        let ClassDemandV1 { deployment, residency, origin, tokens_per_second } = class;
        let residency = residency.as_deref().unwrap_or_default().as_bytes();
        of(&[deployment.as_bytes(), residency, origin.as_bytes(), &tokens_per_second.to_le_bytes()])
    });
    // No report of the regions differs from one of none.
    let known = u64::from(demand.reachable_regions.is_some());
    let regions = demand.reachable_regions.iter().flatten().map(|region| of(&[region.as_bytes()]));
    classes.chain(regions).fold(known, u64::wrapping_add)
}

/// Reports of one gateway.
#[derive(Debug, Default)]
pub struct DemandReporter {
    /// Demand that the hub has.
    acknowledged: Option<DemandV1>,
    /// Complete reports before the next changes.
    complete_left: u32,
}

impl DemandReporter {
    /// Returns the next report of a demand, and whether it has changes only.
    pub fn report(&mut self, demand: &DemandV1) -> (DemandReportV1, bool) {
        let base = self.acknowledged.take().filter(|base| base.boot_id == demand.boot_id);
        let Some(base) = base.filter(|_| self.complete_left == 0) else {
            self.complete_left = self.complete_left.saturating_sub(1);
            return (DemandReportV1::complete(demand.clone()), false);
        };
        (DemandReportV1::changes(&base, demand), true)
    }

    /// Records that the hub has accepted a report of this demand.
    pub fn acknowledged(&mut self, demand: &DemandV1) {
        self.acknowledged = Some(demand.clone());
    }

    /// Records that the hub has rejected changes. The next report is complete.
    pub fn rejected(&mut self) {
        self.complete_left = COMPLETE_AFTER_REJECTION;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn demand(classes: &[(&str, u64)], regions: Option<&[&str]>) -> DemandV1 {
        let class = |(name, tokens): &(&str, u64)| ClassDemandV1 {
            deployment: (*name).to_owned(),
            residency: (*tokens % 2 == 0).then(|| "eu".to_owned()),
            origin: "aws/us-east-1".to_owned(),
            tokens_per_second: *tokens,
        };
        DemandV1 {
            version: VERSION,
            gateway: "aws/us-east-1".to_owned(),
            boot_id: 1,
            classes: classes.iter().map(class).collect(),
            reachable_regions: regions.map(|regions| regions.iter().map(|id| (*id).to_owned()).collect()),
        }
    }

    fn sent(report: &DemandReportV1) -> DemandReportV1 {
        serde_json::from_str(&serde_json::to_string(report).unwrap()).unwrap()
    }

    #[test]
    fn any_sequence_of_demands_is_restored_and_an_idle_report_has_no_names() {
        let all = ["aws/us-east-1", "aws/eu-central-1"];
        let demands = [
            demand(&[], None),
            demand(&[("a", 1), ("b", 2)], Some(&all)),
            demand(&[("a", 1), ("b", 2)], Some(&all)),
            demand(&[("a", 3), ("c", 4)], Some(&all[..1])),
            demand(&[("a", 3)], None),
            demand(&[], Some(&[])),
        ];
        let (mut reporter, mut known) = (DemandReporter::default(), None);
        for (number, demand) in demands.iter().enumerate() {
            let (report, has_changes) = reporter.report(demand);
            assert_eq!(has_changes, number > 0);
            let text = serde_json::to_string(&report).unwrap();
            if number == 2 {
                assert!(!text.contains("eu-central-1") && text.len() < 150, "{text}");
            }
            let restored = sent(&report).restore(known.as_ref()).unwrap();
            assert_eq!(restored, *demand);
            known = Some(restored);
            reporter.acknowledged(demand);
        }
    }

    #[test]
    fn changes_of_an_unknown_demand_are_rejected_and_the_next_reports_are_complete() {
        let (first, second) = (demand(&[("a", 1)], None), demand(&[("a", 3)], None));
        let mut reporter = DemandReporter::default();
        reporter.report(&first);
        reporter.acknowledged(&first);
        let (report, has_changes) = reporter.report(&second);
        assert!(has_changes);
        assert_eq!(report.clone().restore(None), Err(DemandReportError::UnknownBase), "another hub");
        assert_eq!(report.clone().restore(Some(&second)), Err(DemandReportError::UnknownBase));
        let mut forged = report.clone();
        forged.changes.as_mut().unwrap().set[0].tokens_per_second = 9;
        assert_eq!(
            forged.restore(Some(&first)),
            Err(DemandReportError::UnknownBase),
            "its checksum is another"
        );
        assert_eq!(report.restore(Some(&first)), Ok(second.clone()));
        reporter.rejected();
        for number in 0..=COMPLETE_AFTER_REJECTION {
            assert_eq!(reporter.report(&second).1, number == COMPLETE_AFTER_REJECTION);
            reporter.acknowledged(&second);
        }
        assert!(reporter.report(&first).1);
        assert!(!reporter.report(&first).1, "after a request without a response");
    }

    #[test]
    fn a_report_that_is_invalid_is_rejected_with_its_field() {
        let check = |change: serde_json::Value, field: &str| {
            let mut report = json!({"version": 1, "gateway": "aws/us-east-1", "boot_id": 1});
            report.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            let report: DemandReportV1 = serde_json::from_value(report).unwrap();
            let known = demand(&[], None);
            match report.restore(Some(&known)) {
                Err(DemandReportError::Invalid(error)) => assert_eq!(error.field, field),
                other => panic!("{other:?}"),
            }
        };
        let removed = json!({"deployment": "a", "residency": null, "origin": "aws/us-east-1"});
        check(json!({}), "classes");
        check(json!({"classes": [], "changes": {"base": 0, "checksum": 0}}), "changes");
        let many = vec![removed; ROWS_MAX + 1];
        check(json!({"changes": {"base": 0, "checksum": 0, "removed": many}}), "changes.removed");
    }

    /// As sent by older gateways, and read by older hubs.
    #[test]
    fn a_complete_report_is_the_message_without_changes_and_one_with_changes_is_not() {
        let demand = demand(&[("a", 1)], Some(&["aws/us-east-1"]));
        let text = serde_json::to_string(&demand).unwrap();
        let report: DemandReportV1 = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_string(&report).unwrap(), text);
        let changes = DemandReportV1::changes(&demand, &demand);
        assert!(serde_json::from_str::<DemandV1>(&serde_json::to_string(&changes).unwrap()).is_err());
    }
}
