//! Values for tests, of which a test states what matters to it.

use std::collections::{BTreeMap, BTreeSet};

use regions::{Accelerators, Deployment, EngineKind, EngineSpec, Precision, ResidencyPolicy, Scaling, Task};
use scheduler_api::plan::RegionCapacity;
use scheduler_api::registration::Registration;

/// Returns the registration of a spoke that starts replicas and has none.
pub(crate) fn some_registration(region: &str) -> Registration {
    Registration {
        region: region.parse().unwrap(),
        instance: "a".parse().unwrap(),
        endpoint: ([10, 0, 0, 1], 7100).into(),
        boot_id: 1,
        deployments: BTreeSet::new(),
        capacity: RegionCapacity::default(),
        models: BTreeMap::new(),
        failures: BTreeMap::new(),
        engines: None,
        draining: false,
        scales: true,
        job_log: None,
        accelerators: Accelerators::new(),
    }
}

/// Returns a deployment without residency policy, regions and placement.
pub(crate) fn some_deployment(name: &str) -> Deployment {
    Deployment {
        name: name.parse().unwrap(),
        task: Task::Embed,
        model: "pypi://m".to_owned(),
        engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 },
        residency: ResidencyPolicy::Anywhere,
        regions: Vec::new(),
        order: Vec::new(),
        placement: None,
        scaling: Scaling::default(),
    }
}
