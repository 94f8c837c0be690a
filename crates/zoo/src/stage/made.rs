//! Makes the stages of models, and the parts of them that ranks have.

use std::ops::Range;
use std::sync::Arc;

use farflung_base::Axis;
use farflung_tensor::Device;

use super::{ActivationPolicy, Stage};
use crate::ZooError;
use crate::cut::AxisShare;
use crate::exchange::{Alone, Exchange};
use crate::layer::Builder;
use crate::spec::ModelSpec;

impl Stage {
    /// Creates the stage of a whole model.
    pub fn whole(spec: &ModelSpec, device: &Device) -> Result<Self, ZooError> {
        Self::new(spec, 0..spec.layers(), device)
    }

    /// Creates a stage of the given layers.
    ///
    /// Errors: those of [`ModelSpec::validate`]; [`ZooError::Config`] if the range is not within the model's
    /// layers. The range may be empty only between two layers.
    pub fn new(spec: &ModelSpec, layers: Range<usize>, device: &Device) -> Result<Self, ZooError> {
        Self::piece(spec, layers, device, (AxisShare::whole(), Arc::new(Alone)))
    }

    /// Creates one rank's piece of a stage, among the ranks that divide the width of its layers along
    /// [`Axis::Tensor`]: see [`TensorSpec::cut`](crate::TensorSpec::cut).
    ///
    /// Errors: as [`Stage::new`]; [`ZooError::Config`] if a rank has no head or no column of a layer, or the
    /// exchange is that of another rank.
    pub fn piece(
        spec: &ModelSpec,
        layers: Range<usize>,
        device: &Device,
        (share, exchange): (AxisShare, Arc<dyn Exchange>),
    ) -> Result<Self, ZooError> {
        Self::shared(spec, layers, device, [share, AxisShare::whole()], exchange)
    }

    /// Creates one rank's part of a stage, among the ranks that divide the width of its layers along
    /// [`Axis::Tensor`], and among those that divide its experts along [`Axis::Expert`]. The latter each have
    /// sequences of their own, run the same passes at the same time, and send tokens to the experts. Each has
    /// all tensors but the experts of others; its gradients of experts are those of the sequences of all, and
    /// of other tensors those of its own sequences.
    ///
    /// Errors: as [`Stage::piece`]; [`ZooError::Config`] if a rank has no expert.
    pub fn shared(
        spec: &ModelSpec,
        layers: Range<usize>,
        device: &Device,
        [share, experts]: [AxisShare; 2],
        exchange: Arc<dyn Exchange>,
    ) -> Result<Self, ZooError> {
        spec.validate()?;
        spec.check_cut(&share)?;
        spec.check_experts(&experts)?;
        for (share, along, expected) in [
            (&share, Axis::Tensor, "the rank and the number of ranks of the exchange along the tensor axis"),
            (
                &experts,
                Axis::Expert,
                "the rank and the number of ranks of the exchange along the expert view",
            ),
        ] {
            if (share.rank(), share.ranks()) != (exchange.rank(along), exchange.size(along)) {
                return Err(ZooError::Config { field: "share", value: share.rank(), expected });
            }
        }
        let between = layers.start == layers.end && layers.start > 0 && layers.end < spec.layers();
        if (layers.is_empty() && !between) || layers.end > spec.layers() {
            return Err(ZooError::Config {
                field: "layers",
                value: layers.end,
                expected: "a range within the model's layers, empty only between two layers",
            });
        }
        let mut builder = Builder::new(spec).share(share.clone()).experts_of(experts.clone()).on(device);
        let made = builder.model(spec, |block| layers.contains(&block))?;
        Ok(Self {
            spec: spec.clone(),
            device: device.clone(),
            layout: builder.layout()?,
            specs: builder.into_specs(),
            share,
            experts,
            exchange,
            sequence: None,
            context: None,
            layers: made,
            gradient_scale: 1.0,
            activation_policy: ActivationPolicy::default(),
            first_block: layers.start,
        })
    }
}
