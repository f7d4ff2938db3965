# Made by typings/generate_tensorrt.py. What the bindings say of themselves isn't consistent everywhere (a method may
# not take what its base class takes):
# mypy: ignore-errors
import builtins
import collections.abc
import numpy
import typing
import typing_extensions
__all__: list[str] = ['APILanguage', 'ActivationType', 'AllocatorFlag', 'AttentionIOForm', 'AttentionNormalizationOp', 'BoundingBoxFormat', 'Builder', 'BuilderFlag', 'CausalMaskKind', 'CollectiveOperation', 'CumulativeOperation', 'DLAWorkspaceAllocationStrategy', 'DataType', 'DeviceType', 'DimensionOperation', 'Dims', 'Dims2', 'Dims3', 'Dims4', 'DimsExprs', 'DimsHW', 'DynamicPluginTensorDesc', 'ElementWiseOperation', 'EngineCapability', 'EngineInspector', 'EngineStat', 'ErrorCode', 'ErrorCodeTRT', 'ExecutionContextAllocationStrategy', 'FallbackString', 'FillOperation', 'GatherMode', 'HardwareCompatibilityLevel', 'IActivationLayer', 'IAssertionLayer', 'IAttention', 'IAttentionBoundaryLayer', 'IAttentionInputLayer', 'IAttentionOutputLayer', 'IBuilderConfig', 'ICastLayer', 'IConcatenationLayer', 'IConditionLayer', 'IConstantLayer', 'IConvolutionLayer', 'ICudaEngine', 'ICumulativeLayer', 'IDebugListener', 'IDeconvolutionLayer', 'IDequantizeLayer', 'IDimensionExpr', 'IDistCollectiveLayer', 'IDynamicQuantizeLayer', 'IEinsumLayer', 'IElementWiseLayer', 'IErrorRecorder', 'IExecutionContext', 'IExprBuilder', 'IFillLayer', 'IGatherLayer', 'IGpuAllocator', 'IGpuAsyncAllocator', 'IGridSampleLayer', 'IHostMemory', 'IIdentityLayer', 'IIfConditional', 'IIfConditionalBoundaryLayer', 'IIfConditionalInputLayer', 'IIfConditionalOutputLayer', 'IIteratorLayer', 'IKVCacheUpdateLayer', 'ILRNLayer', 'ILayer', 'ILogger', 'ILoop', 'ILoopBoundaryLayer', 'ILoopOutputLayer', 'IMatrixMultiplyLayer', 'IMoELayer', 'INMSLayer', 'INetworkDefinition', 'INonZeroLayer', 'INormalizationLayer', 'IOneHotLayer', 'IOptimizationProfile', 'IOutputAllocator', 'IPaddingLayer', 'IParametricReLULayer', 'IPluginCapability', 'IPluginCreator', 'IPluginCreatorInterface', 'IPluginCreatorV3One', 'IPluginCreatorV3Quick', 'IPluginRegistry', 'IPluginResource', 'IPluginResourceContext', 'IPluginV2', 'IPluginV2DynamicExt', 'IPluginV2DynamicExtBase', 'IPluginV2Ext', 'IPluginV2Layer', 'IPluginV3', 'IPluginV3Layer', 'IPluginV3OneBuild', 'IPluginV3OneBuildV2', 'IPluginV3OneCore', 'IPluginV3OneRuntime', 'IPluginV3QuickAOTBuild', 'IPluginV3QuickBuild', 'IPluginV3QuickCore', 'IPluginV3QuickRuntime', 'IPoolingLayer', 'IProfiler', 'IProgressMonitor', 'IQuantizeLayer', 'IRaggedSoftMaxLayer', 'IRecurrenceLayer', 'IReduceLayer', 'IResizeLayer', 'IReverseSequenceLayer', 'IRotaryEmbeddingLayer', 'IRuntimeConfig', 'IScaleLayer', 'IScatterLayer', 'ISelectLayer', 'ISerializationConfig', 'IShapeLayer', 'IShuffleLayer', 'ISliceLayer', 'ISoftMaxLayer', 'ISqueezeLayer', 'IStreamReaderV2', 'IStreamWriter', 'ISymExpr', 'ISymExprs', 'ITensor', 'ITimingCache', 'ITopKLayer', 'ITripLimitLayer', 'IUnaryLayer', 'IUnsqueezeLayer', 'IVersionedInterface', 'InterfaceInfo', 'InterpolationMode', 'KVCacheMode', 'KernelLaunchParams', 'LayerInformationFormat', 'LayerType', 'Logger', 'LoopOutput', 'MatrixOperation', 'MemoryPoolType', 'MoEActType', 'NetworkDefinitionCreationFlag', 'NodeIndices', 'OnnxParser', 'OnnxParserFlag', 'OnnxParserRefitter', 'PaddingMode', 'ParserError', 'Permutation', 'PluginArgDataType', 'PluginArgType', 'PluginCapabilityType', 'PluginCreatorVersion', 'PluginField', 'PluginFieldCollection', 'PluginFieldCollection_', 'PluginFieldType', 'PluginTensorDesc', 'PoolingType', 'PreviewFeature', 'Profiler', 'ProfilingVerbosity', 'QuickPluginCreationRequest', 'ReduceOperation', 'Refitter', 'ResizeCoordinateTransformation', 'ResizeRoundMode', 'ResizeSelector', 'Runtime', 'RuntimePlatform', 'SampleMode', 'ScaleMode', 'ScatterMode', 'SeekPosition', 'SerializationFlag', 'TacticSource', 'TempfileControlFlag', 'TensorFormat', 'TensorIOMode', 'TensorLocation', 'TensorRTPhase', 'TilingOptimizationLevel', 'TimingCacheKey', 'TimingCacheValue', 'TopKOperation', 'TripLimit', 'UnaryOperation', 'Weights', 'WeightsRole', 'bfloat16', 'bool', 'e8m0', 'float16', 'float32', 'fp4', 'fp8', 'get_builder_plugin_registry', 'get_nv_onnx_parser_version', 'get_plugin_registry', 'init_libnvinfer_plugins', 'int32', 'int4', 'int64', 'int8', 'uint8']

class FallbackString:

    @typing.overload
    def __init__(self, arg0: str) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: str) -> None:
        ...

class PluginFieldCollection:

    def __bool__(self) -> builtins.bool:
        ...

    @typing.overload
    def __delitem__(self, arg0: typing.SupportsInt) -> None:
        ...

    @typing.overload
    def __delitem__(self, arg0: slice) -> None:
        ...

    @typing.overload
    def __getitem__(self, s: slice) -> PluginFieldCollection:
        ...

    @typing.overload
    def __getitem__(self, arg0: typing.SupportsInt) -> typing.Any:
        ...

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: PluginFieldCollection) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: collections.abc.Iterable) -> None:
        ...

    def __iter__(self) -> collections.abc.Iterator[typing.Any]:
        ...

    def __len__(self) -> int:
        ...

    @typing.overload
    def __setitem__(self, arg0: typing.SupportsInt, arg1: typing.Any) -> None:
        ...

    @typing.overload
    def __setitem__(self, arg0: slice, arg1: PluginFieldCollection) -> None:
        ...

    def append(self, x: typing.Any) -> None:
        ...

    def clear(self) -> None:
        ...

    @typing.overload
    def extend(self, L: PluginFieldCollection) -> None:
        ...

    @typing.overload
    def extend(self, L: collections.abc.Iterable) -> None:
        ...

    def insert(self, i: typing.SupportsInt, x: typing.Any) -> None:
        ...

    @typing.overload
    def pop(self) -> typing.Any:
        ...

    @typing.overload
    def pop(self, i: typing.SupportsInt) -> typing.Any:
        ...

class DataType:
    BF16: typing.ClassVar[DataType]
    BOOL: typing.ClassVar[DataType]
    E8M0: typing.ClassVar[DataType]
    FLOAT: typing.ClassVar[DataType]
    FP4: typing.ClassVar[DataType]
    FP8: typing.ClassVar[DataType]
    HALF: typing.ClassVar[DataType]
    INT32: typing.ClassVar[DataType]
    INT4: typing.ClassVar[DataType]
    INT64: typing.ClassVar[DataType]
    INT8: typing.ClassVar[DataType]
    UINT8: typing.ClassVar[DataType]
    __members__: typing.ClassVar[dict[str, DataType]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def itemsize(self):
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class WeightsRole:
    ANY: typing.ClassVar[WeightsRole]
    BIAS: typing.ClassVar[WeightsRole]
    CONSTANT: typing.ClassVar[WeightsRole]
    KERNEL: typing.ClassVar[WeightsRole]
    SCALE: typing.ClassVar[WeightsRole]
    SHIFT: typing.ClassVar[WeightsRole]
    __members__: typing.ClassVar[dict[str, WeightsRole]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class Weights:

    @typing.overload
    def __init__(self, type: DataType=...) -> None:
        ...

    @typing.overload
    def __init__(self, type: DataType, ptr: typing.SupportsInt, count: typing.SupportsInt) -> None:
        ...

    @typing.overload
    def __init__(self, a: numpy.ndarray) -> None:
        ...

    def __len__(self) -> int:
        ...

    def numpy(self) -> typing.Any:
        ...

    @property
    def dtype(self) -> DataType:
        ...

    @property
    def nbytes(self) -> int:
        ...

    @property
    def size(self) -> int:
        ...

class Dims:
    MAX_DIMS: typing.ClassVar[int] = 8
    __hash__: typing.ClassVar[None] = None

    @typing.overload
    def __eq__(self, arg0: list) -> builtins.bool:
        ...

    @typing.overload
    def __eq__(self, arg0: tuple) -> builtins.bool:
        ...

    @typing.overload
    def __getitem__(self, arg0: typing.SupportsInt) -> int:
        ...

    @typing.overload
    def __getitem__(self, arg0: slice) -> tuple:
        ...

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, shape: collections.abc.Sequence[typing.SupportsInt]) -> None:
        ...

    def __len__(self) -> int:
        ...

    def __repr__(self) -> str:
        ...

    @typing.overload
    def __setitem__(self, arg0: typing.SupportsInt, arg1: typing.SupportsInt) -> None:
        ...

    @typing.overload
    def __setitem__(self, arg0: slice, arg1: Dims) -> None:
        ...

    def __str__(self) -> str:
        ...

class Dims2(Dims):

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, dim0: typing.SupportsInt, dim1: typing.SupportsInt) -> None:
        ...

    @typing.overload
    def __init__(self, shape: collections.abc.Sequence[typing.SupportsInt]) -> None:
        ...

class DimsHW(Dims2):

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, h: typing.SupportsInt, w: typing.SupportsInt) -> None:
        ...

    @typing.overload
    def __init__(self, shape: collections.abc.Sequence[typing.SupportsInt]) -> None:
        ...

    @property
    def h(self) -> int:
        ...

    @h.setter
    def h(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def w(self) -> int:
        ...

    @w.setter
    def w(self, arg1: typing.SupportsInt) -> None:
        ...

class Dims3(Dims):

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, dim0: typing.SupportsInt, dim1: typing.SupportsInt, dim2: typing.SupportsInt) -> None:
        ...

    @typing.overload
    def __init__(self, shape: collections.abc.Sequence[typing.SupportsInt]) -> None:
        ...

class Dims4(Dims):

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, dim0: typing.SupportsInt, dim1: typing.SupportsInt, dim2: typing.SupportsInt, dim3: typing.SupportsInt) -> None:
        ...

    @typing.overload
    def __init__(self, shape: collections.abc.Sequence[typing.SupportsInt]) -> None:
        ...

class IHostMemory:

    @staticmethod
    def __enter__(this):
        ...

    @staticmethod
    def __exit__(this, exc_type, exc_value, traceback):
        ...

    def __del__(self) -> None:
        ...

    @property
    def dtype(self) -> DataType:
        ...

    @property
    def nbytes(self) -> int:
        ...

class InterfaceInfo:
    kind: str

    @property
    def major(self) -> int:
        ...

    @major.setter
    def major(self, arg0: typing.SupportsInt) -> None:
        ...

    @property
    def minor(self) -> int:
        ...

    @minor.setter
    def minor(self, arg0: typing.SupportsInt) -> None:
        ...

class APILanguage:
    CPP: typing.ClassVar[APILanguage]
    PYTHON: typing.ClassVar[APILanguage]
    __members__: typing.ClassVar[dict[str, APILanguage]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IVersionedInterface:

    @property
    def api_language(self) -> APILanguage:
        ...

    @property
    def interface_info(self) -> InterfaceInfo:
        ...

class IDimensionExpr:

    def get_constant_value(self) -> int:
        ...

    def is_constant(self) -> builtins.bool:
        ...

    def is_size_tensor(self) -> builtins.bool:
        ...

class DimsExprs:

    def __getitem__(self, arg0: typing.SupportsInt) -> IDimensionExpr:
        ...

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: collections.abc.Sequence[IDimensionExpr]) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: typing.SupportsInt) -> None:
        ...

    def __len__(self) -> int:
        ...

    def __setitem__(self, arg0: typing.SupportsInt, arg1: IDimensionExpr) -> None:
        ...

class DimensionOperation:
    CEIL_DIV: typing.ClassVar[DimensionOperation]
    EQUAL: typing.ClassVar[DimensionOperation]
    FLOOR_DIV: typing.ClassVar[DimensionOperation]
    LESS: typing.ClassVar[DimensionOperation]
    MAX: typing.ClassVar[DimensionOperation]
    MIN: typing.ClassVar[DimensionOperation]
    PROD: typing.ClassVar[DimensionOperation]
    SUB: typing.ClassVar[DimensionOperation]
    SUM: typing.ClassVar[DimensionOperation]
    __members__: typing.ClassVar[dict[str, DimensionOperation]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IExprBuilder:

    def __init__(self) -> None:
        ...

    def constant(self, arg0: typing.SupportsInt) -> IDimensionExpr:
        ...

    def declare_size_tensor(self, arg0: typing.SupportsInt, arg1: IDimensionExpr, arg2: IDimensionExpr) -> IDimensionExpr:
        ...

    def operation(self, arg0: DimensionOperation, arg1: IDimensionExpr, arg2: IDimensionExpr) -> IDimensionExpr:
        ...

class PluginTensorDesc:
    dims: Dims
    format: typing.Any
    type: DataType

    def __init__(self) -> None:
        ...

    @property
    def scale(self) -> float:
        ...

    @scale.setter
    def scale(self, arg0: typing.SupportsFloat) -> None:
        ...

class DynamicPluginTensorDesc:
    desc: PluginTensorDesc
    max: Dims
    min: Dims
    opt: Dims

    def __init__(self) -> None:
        ...

class PluginFieldType:
    BF16: typing.ClassVar[PluginFieldType]
    CHAR: typing.ClassVar[PluginFieldType]
    DIMS: typing.ClassVar[PluginFieldType]
    FLOAT16: typing.ClassVar[PluginFieldType]
    FLOAT32: typing.ClassVar[PluginFieldType]
    FLOAT64: typing.ClassVar[PluginFieldType]
    FP4: typing.ClassVar[PluginFieldType]
    FP8: typing.ClassVar[PluginFieldType]
    INT16: typing.ClassVar[PluginFieldType]
    INT32: typing.ClassVar[PluginFieldType]
    INT4: typing.ClassVar[PluginFieldType]
    INT64: typing.ClassVar[PluginFieldType]
    INT8: typing.ClassVar[PluginFieldType]
    UNKNOWN: typing.ClassVar[PluginFieldType]
    __members__: typing.ClassVar[dict[str, PluginFieldType]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class PluginField:
    type: PluginFieldType

    @typing.overload
    def __init__(self, name: FallbackString='') -> None:
        ...

    @typing.overload
    def __init__(self, name: FallbackString, data: typing_extensions.Buffer, type: PluginFieldType=...) -> None:
        ...

    @property
    def data(self) -> numpy.ndarray:
        ...

    @data.setter
    def data(self, arg1: typing_extensions.Buffer) -> None:
        ...

    @property
    def name(self) -> str:
        ...

    @name.setter
    def name(self, arg1: FallbackString) -> None:
        ...

    @property
    def size(self) -> int:
        ...

    @size.setter
    def size(self, arg0: typing.SupportsInt) -> None:
        ...

class PluginFieldCollection_:

    def __getitem__(self, arg0: typing.SupportsInt) -> PluginField:
        ...

    def __init__(self, arg0: PluginFieldCollection) -> None:
        ...

    def __len__(self) -> int:
        ...

class IPluginV2:
    plugin_namespace: str
    plugin_type: str
    plugin_version: str

    def clone(self) -> IPluginV2:
        ...

    def configure_with_format(self, input_shapes: collections.abc.Sequence[Dims], output_shapes: collections.abc.Sequence[Dims], dtype: DataType, format: typing.Any, max_batch_size: typing.SupportsInt) -> None:
        ...

    def destroy(self) -> None:
        ...

    def execute_async(self, batch_size: typing.SupportsInt, inputs: collections.abc.Sequence[typing_extensions.CapsuleType], outputs: collections.abc.Sequence[typing_extensions.CapsuleType], workspace: typing_extensions.CapsuleType, stream_handle: typing.SupportsInt) -> int:
        ...

    def get_output_shape(self, index: typing.SupportsInt, input_shapes: collections.abc.Sequence[Dims]) -> Dims:
        ...

    def get_workspace_size(self, max_batch_size: typing.SupportsInt) -> int:
        ...

    def initialize(self) -> int:
        ...

    def serialize(self) -> memoryview:
        ...

    def supports_format(self, dtype: DataType, format: typing.Any) -> builtins.bool:
        ...

    def terminate(self) -> None:
        ...

    @property
    def num_outputs(self) -> int:
        ...

    @num_outputs.setter
    def num_outputs(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def serialization_size(self) -> int:
        ...

    @property
    def tensorrt_version(self) -> int:
        ...

class IPluginV2Ext(IPluginV2):

    def attach_to_context(self, cudnn: typing_extensions.CapsuleType, cublas: typing_extensions.CapsuleType, allocator: typing_extensions.CapsuleType) -> None:
        ...

    def clone(self) -> IPluginV2Ext:
        ...

    def configure_plugin(self, input_shapes: collections.abc.Sequence[Dims], output_shapes: collections.abc.Sequence[Dims], input_types: collections.abc.Sequence[DataType], output_types: collections.abc.Sequence[DataType], input_is_broadcasted: collections.abc.Sequence[builtins.bool], output_is_broacasted: collections.abc.Sequence[builtins.bool], format: typing.Any, max_batch_size: typing.SupportsInt) -> None:
        ...

    def detach_from_context(self) -> None:
        ...

    def get_output_data_type(self, index: typing.SupportsInt, input_types: collections.abc.Sequence[DataType]) -> DataType:
        ...

class IPluginV2DynamicExtBase(IPluginV2):
    pass

class IPluginV2DynamicExt(IPluginV2DynamicExtBase, IPluginV2):
    FORMAT_COMBINATION_LIMIT: typing.ClassVar[int] = 100

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: IPluginV2DynamicExt) -> None:
        ...

    def clone(self) -> IPluginV2DynamicExt:
        ...

    def configure_plugin(self, pos: collections.abc.Sequence[DynamicPluginTensorDesc], in_out: collections.abc.Sequence[DynamicPluginTensorDesc]) -> None:
        ...

    def destroy(self) -> None:
        ...

    def enqueue(self, input_desc: collections.abc.Sequence[PluginTensorDesc], output_desc: collections.abc.Sequence[PluginTensorDesc], inputs: collections.abc.Sequence[typing.SupportsInt], outputs: collections.abc.Sequence[typing.SupportsInt], workspace: typing.SupportsInt, stream: typing.SupportsInt) -> None:
        ...

    def get_output_datatype(self, index: typing.SupportsInt, input_types: collections.abc.Sequence[DataType]) -> DataType:
        ...

    def get_output_dimensions(self, output_index: typing.SupportsInt, inputs: collections.abc.Sequence[DimsExprs], expr_builder: IExprBuilder) -> DimsExprs:
        ...

    def get_serialization_size(self) -> int:
        ...

    def get_workspace_size(self, in_: collections.abc.Sequence[PluginTensorDesc], out: collections.abc.Sequence[PluginTensorDesc]) -> int:
        ...

    def initialize(self) -> int:
        ...

    def serialize(self) -> bytes:
        ...

    def supports_format_combination(self, pos: typing.SupportsInt, in_out: collections.abc.Sequence[PluginTensorDesc], num_inputs: typing.SupportsInt) -> builtins.bool:
        ...

    def terminate(self) -> None:
        ...

class IPluginCapability(IVersionedInterface):
    ...

class IPluginV3(IVersionedInterface):

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: IPluginV3) -> None:
        ...

    def clone(self) -> IPluginV3:
        ...

    def destroy(self) -> None:
        ...

    def get_capability_interface(self, type: typing.Any) -> typing.Any:
        ...

class IPluginV3OneCore(IPluginCapability, IVersionedInterface):
    plugin_name: str
    plugin_namespace: str
    plugin_version: str

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: IPluginV3OneCore) -> None:
        ...

class IPluginV3OneBuild(IPluginCapability, IVersionedInterface):
    DEFAULT_FORMAT_COMBINATION_LIMIT: typing.ClassVar[int] = 100
    metadata_string: str
    timing_cache_id: str

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: IPluginV3OneBuild) -> None:
        ...

    def configure_plugin(self: IPluginV3, in_: collections.abc.Sequence[DynamicPluginTensorDesc], out: collections.abc.Sequence[DynamicPluginTensorDesc]) -> None:
        ...

    def get_output_data_types(self: IPluginV3, input_types: collections.abc.Sequence[DataType]) -> list[DataType]:
        ...

    def get_output_shapes(self: IPluginV3, inputs: collections.abc.Sequence[DimsExprs], shape_inputs: collections.abc.Sequence[DimsExprs], expr_builder: IExprBuilder) -> list[DimsExprs]:
        ...

    def get_valid_tactics(self: IPluginV3) -> list[int]:
        ...

    def get_workspace_size(self: IPluginV3, in_: collections.abc.Sequence[DynamicPluginTensorDesc], out: collections.abc.Sequence[DynamicPluginTensorDesc]) -> int:
        ...

    def supports_format_combination(self: IPluginV3, pos: typing.SupportsInt, in_out: collections.abc.Sequence[DynamicPluginTensorDesc], num_inputs: typing.SupportsInt) -> builtins.bool:
        ...

    @property
    def format_combination_limit(self) -> int:
        ...

    @format_combination_limit.setter
    def format_combination_limit(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def num_outputs(self) -> int:
        ...

    @num_outputs.setter
    def num_outputs(self, arg1: typing.SupportsInt) -> None:
        ...

class IPluginV3OneBuildV2(IPluginV3OneBuild, IPluginCapability, IVersionedInterface):

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: IPluginV3OneBuildV2) -> None:
        ...

    def get_aliased_input(self: typing.SupportsInt) -> int:
        ...

class IPluginV3QuickCore(IPluginCapability, IVersionedInterface):
    plugin_name: str
    plugin_namespace: str
    plugin_version: str

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: IPluginV3QuickCore) -> None:
        ...

class IPluginV3QuickBuild(IPluginCapability, IVersionedInterface):

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: IPluginV3QuickBuild) -> None:
        ...

class IPluginV3QuickAOTBuild(IPluginV3QuickBuild, IPluginCapability, IVersionedInterface):

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: IPluginV3QuickAOTBuild) -> None:
        ...

class IPluginV3QuickRuntime(IPluginCapability, IVersionedInterface):

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: IPluginV3QuickRuntime) -> None:
        ...

class IPluginV3OneRuntime(IPluginCapability, IVersionedInterface):

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: IPluginV3OneRuntime) -> None:
        ...

    def attach_to_context(self: IPluginV3, resource_context: typing.Any) -> IPluginV3:
        ...

    def enqueue(self: IPluginV3, input_desc: collections.abc.Sequence[PluginTensorDesc], output_desc: collections.abc.Sequence[PluginTensorDesc], inputs: collections.abc.Sequence[typing.SupportsInt], outputs: collections.abc.Sequence[typing.SupportsInt], workspace: typing.SupportsInt, stream: typing.SupportsInt) -> None:
        ...

    def get_fields_to_serialize(self: IPluginV3) -> PluginFieldCollection_:
        ...

    def on_shape_change(self: IPluginV3, in_: collections.abc.Sequence[PluginTensorDesc], out: collections.abc.Sequence[PluginTensorDesc]) -> None:
        ...

    def set_tactic(self: IPluginV3, tactic: typing.SupportsInt) -> None:
        ...

class IPluginCreatorInterface(IVersionedInterface):
    ...

class IPluginCreator(IPluginCreatorInterface, IVersionedInterface):
    field_names: PluginFieldCollection_
    name: str
    plugin_namespace: str
    plugin_version: str

    def __init__(self) -> None:
        ...

    def create_plugin(self, name: str, field_collection: PluginFieldCollection_) -> IPluginV2:
        ...

    @typing.overload
    def deserialize_plugin(self, name: str, serialized_plugin: typing_extensions.Buffer) -> IPluginV2:
        ...

    @typing.overload
    def deserialize_plugin(self: IPluginV2DynamicExt, name: str, serialized_plugin: bytes) -> IPluginV2DynamicExt:
        ...

class IPluginCreatorV3One(IPluginCreatorInterface, IVersionedInterface):
    field_names: PluginFieldCollection_
    name: str
    plugin_namespace: str
    plugin_version: str

    def __init__(self) -> None:
        ...

    def create_plugin(self, name: str, field_collection: PluginFieldCollection_, phase: typing.Any) -> IPluginV3:
        ...

class IPluginCreatorV3Quick(IPluginCreatorInterface, IVersionedInterface):
    field_names: PluginFieldCollection_
    name: str
    plugin_namespace: str
    plugin_version: str

    def __init__(self) -> None:
        ...

    def create_plugin(self, name: str, namespace: str, field_collection: PluginFieldCollection_, phase: typing.Any, quickPluginType: typing.Any) -> IPluginV3:
        ...

class IPluginResourceContext:

    @property
    def error_recorder(self) -> typing.Any:
        ...

    @property
    def gpu_allocator(self) -> typing.Any:
        ...

class IPluginResource(IVersionedInterface):

    def __init__(self) -> None:
        ...

    def clone(self) -> IPluginResource:
        ...

    def release(self) -> None:
        ...

class IPluginRegistry:
    error_recorder: typing.Any
    parent_search_enabled: builtins.bool

    def acquire_plugin_resource(self, key: str, resource: IPluginResource) -> IPluginResource:
        ...

    @typing.overload
    def deregister_creator(self, creator: IPluginCreatorInterface) -> builtins.bool:
        ...

    @typing.overload
    def deregister_creator(self, creator: IPluginCreatorInterface) -> builtins.bool:
        ...

    def deregister_library(self, handle: typing_extensions.CapsuleType) -> None:
        ...

    def get_creator(self, type: str, version: str, plugin_namespace: str='') -> typing.Any:
        ...

    def load_library(self, plugin_path: str) -> typing_extensions.CapsuleType:
        ...

    @typing.overload
    def register_creator(self, creator: IPluginCreatorInterface, plugin_namespace: str='') -> builtins.bool:
        ...

    @typing.overload
    def register_creator(self, creator: IPluginCreatorInterface, plugin_namespace: str='') -> builtins.bool:
        ...

    def release_plugin_resource(self, key: str) -> int:
        ...

    @property
    def all_creators(self) -> list[typing.Any]:
        ...

    @property
    def all_creators_recursive(self) -> list[typing.Any]:
        ...

class PluginCreatorVersion:
    V1: typing.ClassVar[PluginCreatorVersion]
    V1_PYTHON: typing.ClassVar[PluginCreatorVersion]
    __members__: typing.ClassVar[dict[str, PluginCreatorVersion]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class PluginCapabilityType:
    BUILD: typing.ClassVar[PluginCapabilityType]
    CORE: typing.ClassVar[PluginCapabilityType]
    RUNTIME: typing.ClassVar[PluginCapabilityType]
    __members__: typing.ClassVar[dict[str, PluginCapabilityType]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class TensorRTPhase:
    BUILD: typing.ClassVar[TensorRTPhase]
    RUNTIME: typing.ClassVar[TensorRTPhase]
    __members__: typing.ClassVar[dict[str, TensorRTPhase]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class QuickPluginCreationRequest:
    PREFER_AOT: typing.ClassVar[QuickPluginCreationRequest]
    PREFER_JIT: typing.ClassVar[QuickPluginCreationRequest]
    STRICT_AOT: typing.ClassVar[QuickPluginCreationRequest]
    STRICT_JIT: typing.ClassVar[QuickPluginCreationRequest]
    UNKNOWN: typing.ClassVar[QuickPluginCreationRequest]
    __members__: typing.ClassVar[dict[str, QuickPluginCreationRequest]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class KernelLaunchParams:
    block_x: typing.Any
    block_y: typing.Any
    block_z: typing.Any
    grid_x: typing.Any
    grid_y: typing.Any
    grid_z: typing.Any
    shared_mem: typing.Any

class PluginArgType:
    INT: typing.ClassVar[PluginArgType]
    __members__: typing.ClassVar[dict[str, PluginArgType]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class PluginArgDataType:
    INT16: typing.ClassVar[PluginArgDataType]
    INT32: typing.ClassVar[PluginArgDataType]
    INT8: typing.ClassVar[PluginArgDataType]
    __members__: typing.ClassVar[dict[str, PluginArgDataType]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class ISymExpr:

    def __init__(self) -> None:
        ...

class ISymExprs:

    def __getitem__(self, arg0: typing.SupportsInt) -> ISymExpr:
        ...

    def __len__(self) -> int:
        ...

    def __setitem__(self, arg0: typing.SupportsInt, arg1: ISymExpr) -> builtins.bool:
        ...

    @property
    def nbSymExprs(self) -> int:
        ...

    @nbSymExprs.setter
    def nbSymExprs(self, arg1: typing.SupportsInt) -> builtins.bool:
        ...

class LayerType:
    ACTIVATION: typing.ClassVar[LayerType]
    ASSERTION: typing.ClassVar[LayerType]
    ATTENTION_INPUT: typing.ClassVar[LayerType]
    ATTENTION_OUTPUT: typing.ClassVar[LayerType]
    CAST: typing.ClassVar[LayerType]
    CONCATENATION: typing.ClassVar[LayerType]
    CONDITION: typing.ClassVar[LayerType]
    CONDITIONAL_INPUT: typing.ClassVar[LayerType]
    CONDITIONAL_OUTPUT: typing.ClassVar[LayerType]
    CONSTANT: typing.ClassVar[LayerType]
    CONVOLUTION: typing.ClassVar[LayerType]
    CUMULATIVE: typing.ClassVar[LayerType]
    DECONVOLUTION: typing.ClassVar[LayerType]
    DEQUANTIZE: typing.ClassVar[LayerType]
    DIST_COLLECTIVE: typing.ClassVar[LayerType]
    DYNAMIC_QUANTIZE: typing.ClassVar[LayerType]
    EINSUM: typing.ClassVar[LayerType]
    ELEMENTWISE: typing.ClassVar[LayerType]
    FILL: typing.ClassVar[LayerType]
    GATHER: typing.ClassVar[LayerType]
    GRID_SAMPLE: typing.ClassVar[LayerType]
    IDENTITY: typing.ClassVar[LayerType]
    ITERATOR: typing.ClassVar[LayerType]
    KV_CACHE_UPDATE: typing.ClassVar[LayerType]
    LOOP_OUTPUT: typing.ClassVar[LayerType]
    LRN: typing.ClassVar[LayerType]
    MATRIX_MULTIPLY: typing.ClassVar[LayerType]
    MOE: typing.ClassVar[LayerType]
    NMS: typing.ClassVar[LayerType]
    NON_ZERO: typing.ClassVar[LayerType]
    NORMALIZATION: typing.ClassVar[LayerType]
    ONE_HOT: typing.ClassVar[LayerType]
    PADDING: typing.ClassVar[LayerType]
    PARAMETRIC_RELU: typing.ClassVar[LayerType]
    PLUGIN: typing.ClassVar[LayerType]
    PLUGIN_V2: typing.ClassVar[LayerType]
    PLUGIN_V3: typing.ClassVar[LayerType]
    POOLING: typing.ClassVar[LayerType]
    QUANTIZE: typing.ClassVar[LayerType]
    RAGGED_SOFTMAX: typing.ClassVar[LayerType]
    RECURRENCE: typing.ClassVar[LayerType]
    REDUCE: typing.ClassVar[LayerType]
    RESIZE: typing.ClassVar[LayerType]
    REVERSE_SEQUENCE: typing.ClassVar[LayerType]
    ROTARY_EMBEDDING: typing.ClassVar[LayerType]
    SCALE: typing.ClassVar[LayerType]
    SCATTER: typing.ClassVar[LayerType]
    SELECT: typing.ClassVar[LayerType]
    SHAPE: typing.ClassVar[LayerType]
    SHUFFLE: typing.ClassVar[LayerType]
    SLICE: typing.ClassVar[LayerType]
    SOFTMAX: typing.ClassVar[LayerType]
    SQUEEZE: typing.ClassVar[LayerType]
    TOPK: typing.ClassVar[LayerType]
    TRIP_LIMIT: typing.ClassVar[LayerType]
    UNARY: typing.ClassVar[LayerType]
    UNSQUEEZE: typing.ClassVar[LayerType]
    __members__: typing.ClassVar[dict[str, LayerType]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class TensorFormat:
    CDHW32: typing.ClassVar[TensorFormat]
    CHW16: typing.ClassVar[TensorFormat]
    CHW2: typing.ClassVar[TensorFormat]
    CHW32: typing.ClassVar[TensorFormat]
    CHW4: typing.ClassVar[TensorFormat]
    DHWC: typing.ClassVar[TensorFormat]
    DHWC8: typing.ClassVar[TensorFormat]
    DLA_HWC4: typing.ClassVar[TensorFormat]
    DLA_LINEAR: typing.ClassVar[TensorFormat]
    HWC: typing.ClassVar[TensorFormat]
    HWC16: typing.ClassVar[TensorFormat]
    HWC8: typing.ClassVar[TensorFormat]
    LINEAR: typing.ClassVar[TensorFormat]
    __members__: typing.ClassVar[dict[str, TensorFormat]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class ITensor:
    broadcast_across_batch: builtins.bool
    location: typing.Any
    name: str
    shape: Dims

    def get_dimension_name(self, index: typing.SupportsInt) -> str:
        ...

    def set_dimension_name(self, index: typing.SupportsInt, name: str) -> None:
        ...

    @property
    def allowed_formats(self) -> int:
        ...

    @allowed_formats.setter
    def allowed_formats(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def dtype(self) -> DataType:
        ...

    @property
    def is_execution_tensor(self) -> builtins.bool:
        ...

    @property
    def is_network_input(self) -> builtins.bool:
        ...

    @property
    def is_network_output(self) -> builtins.bool:
        ...

    @property
    def is_shape_tensor(self) -> builtins.bool:
        ...

class ILayer:
    metadata: str
    name: str

    def get_input(self, index: typing.SupportsInt) -> ITensor:
        ...

    def get_output(self, index: typing.SupportsInt) -> ITensor:
        ...

    def get_output_type(self, index: typing.SupportsInt) -> DataType:
        ...

    def set_input(self, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

    @property
    def num_inputs(self) -> int:
        ...

    @property
    def num_outputs(self) -> int:
        ...

    @property
    def num_ranks(self) -> int:
        ...

    @num_ranks.setter
    def num_ranks(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def type(self) -> LayerType:
        ...

class PaddingMode:
    EXPLICIT_ROUND_DOWN: typing.ClassVar[PaddingMode]
    EXPLICIT_ROUND_UP: typing.ClassVar[PaddingMode]
    SAME_LOWER: typing.ClassVar[PaddingMode]
    SAME_UPPER: typing.ClassVar[PaddingMode]
    __members__: typing.ClassVar[dict[str, PaddingMode]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IConvolutionLayer(ILayer):
    dilation_nd: Dims
    kernel_size_nd: Dims
    padding_mode: PaddingMode
    padding_nd: Dims
    post_padding: Dims
    pre_padding: Dims
    stride_nd: Dims

    @property
    def bias(self) -> typing.Any:
        ...

    @bias.setter
    def bias(self, arg1: Weights) -> None:
        ...

    @property
    def kernel(self) -> typing.Any:
        ...

    @kernel.setter
    def kernel(self, arg1: Weights) -> None:
        ...

    @property
    def num_groups(self) -> int:
        ...

    @num_groups.setter
    def num_groups(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def num_output_maps(self) -> int:
        ...

    @num_output_maps.setter
    def num_output_maps(self, arg1: typing.SupportsInt) -> None:
        ...

class ActivationType:
    CLIP: typing.ClassVar[ActivationType]
    ELU: typing.ClassVar[ActivationType]
    GELU_ERF: typing.ClassVar[ActivationType]
    GELU_TANH: typing.ClassVar[ActivationType]
    HARD_SIGMOID: typing.ClassVar[ActivationType]
    LEAKY_RELU: typing.ClassVar[ActivationType]
    RELU: typing.ClassVar[ActivationType]
    SCALED_TANH: typing.ClassVar[ActivationType]
    SELU: typing.ClassVar[ActivationType]
    SIGMOID: typing.ClassVar[ActivationType]
    SOFTPLUS: typing.ClassVar[ActivationType]
    SOFTSIGN: typing.ClassVar[ActivationType]
    TANH: typing.ClassVar[ActivationType]
    THRESHOLDED_RELU: typing.ClassVar[ActivationType]
    __members__: typing.ClassVar[dict[str, ActivationType]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IActivationLayer(ILayer):
    type: ActivationType

    @property
    def alpha(self) -> float:
        ...

    @alpha.setter
    def alpha(self, arg1: typing.SupportsFloat) -> None:
        ...

    @property
    def beta(self) -> float:
        ...

    @beta.setter
    def beta(self, arg1: typing.SupportsFloat) -> None:
        ...

class PoolingType:
    AVERAGE: typing.ClassVar[PoolingType]
    MAX: typing.ClassVar[PoolingType]
    MAX_AVERAGE_BLEND: typing.ClassVar[PoolingType]
    __members__: typing.ClassVar[dict[str, PoolingType]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IPoolingLayer(ILayer):
    average_count_excludes_padding: builtins.bool
    padding_mode: PaddingMode
    padding_nd: Dims
    post_padding: Dims
    pre_padding: Dims
    stride_nd: Dims
    type: PoolingType
    window_size_nd: Dims

    @property
    def blend_factor(self) -> float:
        ...

    @blend_factor.setter
    def blend_factor(self, arg1: typing.SupportsFloat) -> None:
        ...

class ILRNLayer(ILayer):

    @property
    def alpha(self) -> float:
        ...

    @alpha.setter
    def alpha(self, arg1: typing.SupportsFloat) -> None:
        ...

    @property
    def beta(self) -> float:
        ...

    @beta.setter
    def beta(self, arg1: typing.SupportsFloat) -> None:
        ...

    @property
    def k(self) -> float:
        ...

    @k.setter
    def k(self, arg1: typing.SupportsFloat) -> None:
        ...

    @property
    def window_size(self) -> int:
        ...

    @window_size.setter
    def window_size(self, arg1: typing.SupportsInt) -> None:
        ...

class ScaleMode:
    CHANNEL: typing.ClassVar[ScaleMode]
    ELEMENTWISE: typing.ClassVar[ScaleMode]
    UNIFORM: typing.ClassVar[ScaleMode]
    __members__: typing.ClassVar[dict[str, ScaleMode]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IScaleLayer(ILayer):
    mode: ScaleMode

    @property
    def channel_axis(self) -> int:
        ...

    @channel_axis.setter
    def channel_axis(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def power(self) -> typing.Any:
        ...

    @power.setter
    def power(self, arg1: Weights) -> None:
        ...

    @property
    def scale(self) -> typing.Any:
        ...

    @scale.setter
    def scale(self, arg1: Weights) -> None:
        ...

    @property
    def shift(self) -> typing.Any:
        ...

    @shift.setter
    def shift(self, arg1: Weights) -> None:
        ...

class IQuantizeLayer(ILayer):
    block_shape: Dims
    to_type: DataType

    @property
    def axis(self) -> int:
        ...

    @axis.setter
    def axis(self, arg1: typing.SupportsInt) -> None:
        ...

class IDequantizeLayer(ILayer):
    block_shape: Dims
    to_type: DataType

    @property
    def axis(self) -> int:
        ...

    @axis.setter
    def axis(self, arg1: typing.SupportsInt) -> None:
        ...

class IDynamicQuantizeLayer(ILayer):
    block_shape: Dims
    scale_type: DataType
    to_type: DataType

    @property
    def axis(self) -> int:
        ...

    @axis.setter
    def axis(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def block_size(self) -> int:
        ...

    @block_size.setter
    def block_size(self, arg1: typing.SupportsInt) -> None:
        ...

class ISoftMaxLayer(ILayer):

    @property
    def axes(self) -> int:
        ...

    @axes.setter
    def axes(self, arg1: typing.SupportsInt) -> None:
        ...

class IConcatenationLayer(ILayer):

    @property
    def axis(self) -> int:
        ...

    @axis.setter
    def axis(self, arg1: typing.SupportsInt) -> None:
        ...

class IDeconvolutionLayer(ILayer):
    dilation_nd: Dims
    kernel_size_nd: Dims
    padding_mode: PaddingMode
    padding_nd: Dims
    post_padding: Dims
    pre_padding: Dims
    stride_nd: Dims

    @property
    def bias(self) -> typing.Any:
        ...

    @bias.setter
    def bias(self, arg1: Weights) -> None:
        ...

    @property
    def kernel(self) -> typing.Any:
        ...

    @kernel.setter
    def kernel(self, arg1: Weights) -> None:
        ...

    @property
    def num_groups(self) -> int:
        ...

    @num_groups.setter
    def num_groups(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def num_output_maps(self) -> int:
        ...

    @num_output_maps.setter
    def num_output_maps(self, arg1: typing.SupportsInt) -> None:
        ...

class ElementWiseOperation:
    AND: typing.ClassVar[ElementWiseOperation]
    DIV: typing.ClassVar[ElementWiseOperation]
    EQUAL: typing.ClassVar[ElementWiseOperation]
    FLOOR_DIV: typing.ClassVar[ElementWiseOperation]
    GREATER: typing.ClassVar[ElementWiseOperation]
    LESS: typing.ClassVar[ElementWiseOperation]
    MAX: typing.ClassVar[ElementWiseOperation]
    MIN: typing.ClassVar[ElementWiseOperation]
    OR: typing.ClassVar[ElementWiseOperation]
    POW: typing.ClassVar[ElementWiseOperation]
    PROD: typing.ClassVar[ElementWiseOperation]
    SUB: typing.ClassVar[ElementWiseOperation]
    SUM: typing.ClassVar[ElementWiseOperation]
    XOR: typing.ClassVar[ElementWiseOperation]
    __members__: typing.ClassVar[dict[str, ElementWiseOperation]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IElementWiseLayer(ILayer):
    op: ElementWiseOperation

class ScatterMode:
    ELEMENT: typing.ClassVar[ScatterMode]
    ND: typing.ClassVar[ScatterMode]
    __members__: typing.ClassVar[dict[str, ScatterMode]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IScatterLayer(ILayer):
    mode: ScatterMode

    @property
    def axis(self) -> int:
        ...

    @axis.setter
    def axis(self, arg1: typing.SupportsInt) -> None:
        ...

class IGatherLayer(ILayer):
    mode: typing.Any

    @property
    def axis(self) -> int:
        ...

    @axis.setter
    def axis(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def num_elementwise_dims(self) -> int:
        ...

    @num_elementwise_dims.setter
    def num_elementwise_dims(self, arg1: typing.SupportsInt) -> None:
        ...

class GatherMode:
    DEFAULT: typing.ClassVar[GatherMode]
    ELEMENT: typing.ClassVar[GatherMode]
    ND: typing.ClassVar[GatherMode]
    __members__: typing.ClassVar[dict[str, GatherMode]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IPluginV2Layer(ILayer):

    @property
    def plugin(self) -> IPluginV2:
        ...

class IPluginV3Layer(ILayer):

    @property
    def plugin(self) -> IPluginV3:
        ...

class UnaryOperation:
    ABS: typing.ClassVar[UnaryOperation]
    ACOS: typing.ClassVar[UnaryOperation]
    ACOSH: typing.ClassVar[UnaryOperation]
    ASIN: typing.ClassVar[UnaryOperation]
    ASINH: typing.ClassVar[UnaryOperation]
    ATAN: typing.ClassVar[UnaryOperation]
    ATANH: typing.ClassVar[UnaryOperation]
    CEIL: typing.ClassVar[UnaryOperation]
    COS: typing.ClassVar[UnaryOperation]
    COSH: typing.ClassVar[UnaryOperation]
    ERF: typing.ClassVar[UnaryOperation]
    EXP: typing.ClassVar[UnaryOperation]
    FLOOR: typing.ClassVar[UnaryOperation]
    ISINF: typing.ClassVar[UnaryOperation]
    ISNAN: typing.ClassVar[UnaryOperation]
    LOG: typing.ClassVar[UnaryOperation]
    NEG: typing.ClassVar[UnaryOperation]
    NOT: typing.ClassVar[UnaryOperation]
    RECIP: typing.ClassVar[UnaryOperation]
    ROUND: typing.ClassVar[UnaryOperation]
    SIGN: typing.ClassVar[UnaryOperation]
    SIN: typing.ClassVar[UnaryOperation]
    SINH: typing.ClassVar[UnaryOperation]
    SQRT: typing.ClassVar[UnaryOperation]
    TAN: typing.ClassVar[UnaryOperation]
    __members__: typing.ClassVar[dict[str, UnaryOperation]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IUnaryLayer(ILayer):
    op: UnaryOperation

class ReduceOperation:
    AVG: typing.ClassVar[ReduceOperation]
    MAX: typing.ClassVar[ReduceOperation]
    MIN: typing.ClassVar[ReduceOperation]
    NONE: typing.ClassVar[ReduceOperation]
    PROD: typing.ClassVar[ReduceOperation]
    SUM: typing.ClassVar[ReduceOperation]
    __members__: typing.ClassVar[dict[str, ReduceOperation]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IReduceLayer(ILayer):
    keep_dims: builtins.bool
    op: ReduceOperation

    @property
    def axes(self) -> int:
        ...

    @axes.setter
    def axes(self, arg1: typing.SupportsInt) -> None:
        ...

class IPaddingLayer(ILayer):
    post_padding_nd: Dims
    pre_padding_nd: Dims

class Permutation:

    def __getitem__(self, arg0: typing.SupportsInt) -> int:
        ...

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: collections.abc.Sequence[typing.SupportsInt]) -> None:
        ...

    def __len__(self) -> int:
        ...

    def __repr__(self) -> str:
        ...

    def __setitem__(self, arg0: typing.SupportsInt, arg1: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

class IShuffleLayer(ILayer):
    first_transpose: Permutation
    second_transpose: Permutation
    zero_is_placeholder: builtins.bool

    def set_input(self: ILayer, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

    @property
    def reshape_dims(self) -> typing.Any:
        ...

    @reshape_dims.setter
    def reshape_dims(self, arg1: Dims) -> None:
        ...

class ISliceLayer(ILayer):
    mode: typing.Any

    def set_input(self: ILayer, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

    @property
    def axes(self) -> typing.Any:
        ...

    @axes.setter
    def axes(self, arg1: Dims) -> None:
        ...

    @property
    def shape(self) -> typing.Any:
        ...

    @shape.setter
    def shape(self, arg1: Dims) -> None:
        ...

    @property
    def start(self) -> typing.Any:
        ...

    @start.setter
    def start(self, arg1: Dims) -> None:
        ...

    @property
    def stride(self) -> typing.Any:
        ...

    @stride.setter
    def stride(self, arg1: Dims) -> None:
        ...

class InterpolationMode:
    CUBIC: typing.ClassVar[InterpolationMode]
    LINEAR: typing.ClassVar[InterpolationMode]
    NEAREST: typing.ClassVar[InterpolationMode]
    __members__: typing.ClassVar[dict[str, InterpolationMode]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class SampleMode:
    CLAMP: typing.ClassVar[SampleMode]
    FILL: typing.ClassVar[SampleMode]
    REFLECT: typing.ClassVar[SampleMode]
    STRICT_BOUNDS: typing.ClassVar[SampleMode]
    WRAP: typing.ClassVar[SampleMode]
    __members__: typing.ClassVar[dict[str, SampleMode]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IShapeLayer(ILayer):
    ...

class TopKOperation:
    MAX: typing.ClassVar[TopKOperation]
    MIN: typing.ClassVar[TopKOperation]
    __members__: typing.ClassVar[dict[str, TopKOperation]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class ITopKLayer(ILayer):
    indices_type: DataType
    op: TopKOperation

    def set_input(self: ILayer, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

    @property
    def axes(self) -> int:
        ...

    @axes.setter
    def axes(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def k(self) -> int:
        ...

    @k.setter
    def k(self, arg1: typing.SupportsInt) -> None:
        ...

class MatrixOperation:
    NONE: typing.ClassVar[MatrixOperation]
    TRANSPOSE: typing.ClassVar[MatrixOperation]
    VECTOR: typing.ClassVar[MatrixOperation]
    __members__: typing.ClassVar[dict[str, MatrixOperation]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IMatrixMultiplyLayer(ILayer):
    op0: MatrixOperation
    op1: MatrixOperation

class CollectiveOperation:
    ALL_GATHER: typing.ClassVar[CollectiveOperation]
    ALL_REDUCE: typing.ClassVar[CollectiveOperation]
    ALL_TO_ALL: typing.ClassVar[CollectiveOperation]
    BROADCAST: typing.ClassVar[CollectiveOperation]
    GATHER: typing.ClassVar[CollectiveOperation]
    REDUCE: typing.ClassVar[CollectiveOperation]
    REDUCE_SCATTER: typing.ClassVar[CollectiveOperation]
    SCATTER: typing.ClassVar[CollectiveOperation]
    __members__: typing.ClassVar[dict[str, CollectiveOperation]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IRaggedSoftMaxLayer(ILayer):
    ...

class IIdentityLayer(ILayer):
    ...

class ICastLayer(ILayer):
    to_type: DataType

class IConstantLayer(ILayer):
    shape: Dims

    @property
    def weights(self) -> typing.Any:
        ...

    @weights.setter
    def weights(self, arg1: Weights) -> None:
        ...

class IParametricReLULayer(ILayer):
    ...

class ResizeCoordinateTransformation:
    ALIGN_CORNERS: typing.ClassVar[ResizeCoordinateTransformation]
    ASYMMETRIC: typing.ClassVar[ResizeCoordinateTransformation]
    HALF_PIXEL: typing.ClassVar[ResizeCoordinateTransformation]
    __members__: typing.ClassVar[dict[str, ResizeCoordinateTransformation]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class ResizeSelector:
    FORMULA: typing.ClassVar[ResizeSelector]
    UPPER: typing.ClassVar[ResizeSelector]
    __members__: typing.ClassVar[dict[str, ResizeSelector]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class ResizeRoundMode:
    CEIL: typing.ClassVar[ResizeRoundMode]
    FLOOR: typing.ClassVar[ResizeRoundMode]
    HALF_DOWN: typing.ClassVar[ResizeRoundMode]
    HALF_UP: typing.ClassVar[ResizeRoundMode]
    __members__: typing.ClassVar[dict[str, ResizeRoundMode]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IResizeLayer(ILayer):
    coordinate_transformation: ResizeCoordinateTransformation
    exclude_outside: builtins.bool
    nearest_rounding: ResizeRoundMode
    resize_mode: InterpolationMode
    selector_for_single_pixel: ResizeSelector

    def set_input(self: ILayer, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

    @property
    def cubic_coeff(self) -> float:
        ...

    @cubic_coeff.setter
    def cubic_coeff(self, arg1: typing.SupportsFloat) -> None:
        ...

    @property
    def scales(self) -> list[float]:
        ...

    @scales.setter
    def scales(self, arg1: collections.abc.Sequence[typing.SupportsFloat]) -> None:
        ...

    @property
    def shape(self) -> typing.Any:
        ...

    @shape.setter
    def shape(self, arg1: Dims) -> None:
        ...

class LoopOutput:
    CONCATENATE: typing.ClassVar[LoopOutput]
    LAST_VALUE: typing.ClassVar[LoopOutput]
    REVERSE: typing.ClassVar[LoopOutput]
    __members__: typing.ClassVar[dict[str, LoopOutput]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class TripLimit:
    COUNT: typing.ClassVar[TripLimit]
    WHILE: typing.ClassVar[TripLimit]
    __members__: typing.ClassVar[dict[str, TripLimit]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class ILoopBoundaryLayer(ILayer):

    @property
    def loop(self) -> typing.Any:
        ...

class IRecurrenceLayer(ILoopBoundaryLayer):

    def set_input(self: ILayer, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

class ILoopOutputLayer(ILoopBoundaryLayer):

    def set_input(self: ILayer, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

    @property
    def axis(self) -> int:
        ...

    @axis.setter
    def axis(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def kind(self) -> LoopOutput:
        ...

class ITripLimitLayer(ILoopBoundaryLayer):

    @property
    def kind(self) -> TripLimit:
        ...

class IIteratorLayer(ILoopBoundaryLayer):
    reverse: builtins.bool

    @property
    def axis(self) -> int:
        ...

    @axis.setter
    def axis(self, arg1: typing.SupportsInt) -> None:
        ...

class ILoop:
    name: str

    def add_iterator(self, tensor: ITensor, axis: typing.SupportsInt=0, reverse: builtins.bool=False) -> IIteratorLayer:
        ...

    def add_loop_output(self, tensor: ITensor, kind: LoopOutput, axis: typing.SupportsInt=0) -> ILoopOutputLayer:
        ...

    def add_recurrence(self, initial_value: ITensor) -> IRecurrenceLayer:
        ...

    def add_trip_limit(self, tensor: ITensor, kind: TripLimit) -> ITripLimitLayer:
        ...

class ISelectLayer(ILayer):
    ...

class IAssertionLayer(ILayer):
    message: str

class IGridSampleLayer(ILayer):
    align_corners: builtins.bool
    interpolation_mode: InterpolationMode
    sample_mode: SampleMode

class BoundingBoxFormat:
    CENTER_SIZES: typing.ClassVar[BoundingBoxFormat]
    CORNER_PAIRS: typing.ClassVar[BoundingBoxFormat]
    __members__: typing.ClassVar[dict[str, BoundingBoxFormat]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class INMSLayer(ILayer):
    bounding_box_format: BoundingBoxFormat
    indices_type: DataType

    def set_input(self: ILayer, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

    @property
    def topk_box_limit(self) -> int:
        ...

    @topk_box_limit.setter
    def topk_box_limit(self, arg1: typing.SupportsInt) -> None:
        ...

class FillOperation:
    LINSPACE: typing.ClassVar[FillOperation]
    RANDOM_NORMAL: typing.ClassVar[FillOperation]
    RANDOM_UNIFORM: typing.ClassVar[FillOperation]
    __members__: typing.ClassVar[dict[str, FillOperation]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IFillLayer(ILayer):
    alpha: typing.Any
    beta: typing.Any
    operation: FillOperation
    to_type: DataType

    def is_alpha_beta_int64(self) -> builtins.bool:
        ...

    def set_input(self: ILayer, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

    @property
    def shape(self) -> typing.Any:
        ...

    @shape.setter
    def shape(self, arg1: Dims) -> None:
        ...

class IIfConditionalBoundaryLayer(ILayer):

    @property
    def conditional(self) -> typing.Any:
        ...

class IIfConditionalOutputLayer(IIfConditionalBoundaryLayer):
    ...

class IIfConditionalInputLayer(IIfConditionalBoundaryLayer):
    ...

class IConditionLayer(IIfConditionalBoundaryLayer):
    ...

class IIfConditional:
    name: str

    def add_input(self, input: ITensor) -> IIfConditionalInputLayer:
        ...

    def add_output(self, true_subgraph_output: ITensor, false_subgraph_output: ITensor) -> IIfConditionalOutputLayer:
        ...

    def set_condition(self, condition: ITensor) -> IConditionLayer:
        ...

class IEinsumLayer(ILayer):
    equation: str

class IOneHotLayer(ILayer):

    @property
    def axis(self) -> int:
        ...

    @axis.setter
    def axis(self, arg1: typing.SupportsInt) -> None:
        ...

class INonZeroLayer(ILayer):
    indices_type: DataType

class IReverseSequenceLayer(ILayer):

    @property
    def batch_axis(self) -> int:
        ...

    @batch_axis.setter
    def batch_axis(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def sequence_axis(self) -> int:
        ...

    @sequence_axis.setter
    def sequence_axis(self, arg1: typing.SupportsInt) -> None:
        ...

class INormalizationLayer(ILayer):

    @property
    def axes(self) -> int:
        ...

    @axes.setter
    def axes(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def epsilon(self) -> float:
        ...

    @epsilon.setter
    def epsilon(self, arg1: typing.SupportsFloat) -> None:
        ...

    @property
    def is_v2(self) -> builtins.bool:
        ...

    @property
    def num_groups(self) -> int:
        ...

    @num_groups.setter
    def num_groups(self, arg1: typing.SupportsInt) -> None:
        ...

class ISqueezeLayer(ILayer):

    def set_input(self: ILayer, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

class IUnsqueezeLayer(ILayer):

    def set_input(self: ILayer, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

class IDistCollectiveLayer(ILayer):
    ...

class CumulativeOperation:
    SUM: typing.ClassVar[CumulativeOperation]
    __members__: typing.ClassVar[dict[str, CumulativeOperation]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class ICumulativeLayer(ILayer):
    exclusive: builtins.bool
    op: CumulativeOperation
    reverse: builtins.bool

class AttentionNormalizationOp:
    NONE: typing.ClassVar[AttentionNormalizationOp]
    SOFTMAX: typing.ClassVar[AttentionNormalizationOp]
    __members__: typing.ClassVar[dict[str, AttentionNormalizationOp]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class AttentionIOForm:
    PACKED_NHD: typing.ClassVar[AttentionIOForm]
    PADDED_BHND: typing.ClassVar[AttentionIOForm]
    __members__: typing.ClassVar[dict[str, AttentionIOForm]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class CausalMaskKind:
    LOWER_RIGHT: typing.ClassVar[CausalMaskKind]
    NONE: typing.ClassVar[CausalMaskKind]
    UPPER_LEFT: typing.ClassVar[CausalMaskKind]
    __members__: typing.ClassVar[dict[str, CausalMaskKind]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IAttention:
    causal: builtins.bool
    causal_kind: CausalMaskKind
    decomposable: builtins.bool
    key_value_form: AttentionIOForm
    key_value_lengths: ITensor
    mask: ITensor
    metadata: str
    name: str
    norm_op: AttentionNormalizationOp
    normalization_quantize_scale: ITensor
    normalization_quantize_to_type: DataType
    query_form: AttentionIOForm
    query_lengths: ITensor

    def get_input(self, index: typing.SupportsInt) -> ITensor:
        ...

    def get_output(self, index: typing.SupportsInt) -> ITensor:
        ...

    def set_input(self, index: typing.SupportsInt, tensor: ITensor) -> builtins.bool:
        ...

    @property
    def num_inputs(self) -> int:
        ...

    @property
    def num_outputs(self) -> int:
        ...

    @property
    def num_ranks(self) -> int:
        ...

    @num_ranks.setter
    def num_ranks(self, arg1: typing.SupportsInt) -> None:
        ...

class IAttentionBoundaryLayer(ILayer):

    @property
    def attention(self) -> IAttention:
        ...

class IAttentionInputLayer(IAttentionBoundaryLayer):
    ...

class IAttentionOutputLayer(IAttentionBoundaryLayer):
    ...

class IRotaryEmbeddingLayer(ILayer):
    interleaved: builtins.bool

    def set_input(self: ILayer, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

    @property
    def rotary_embedding_dim(self) -> int:
        ...

    @rotary_embedding_dim.setter
    def rotary_embedding_dim(self, arg1: typing.SupportsInt) -> builtins.bool:
        ...

class KVCacheMode:
    LINEAR: typing.ClassVar[KVCacheMode]
    __members__: typing.ClassVar[dict[str, KVCacheMode]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IKVCacheUpdateLayer(ILayer):
    cache_mode: KVCacheMode
    update_form: AttentionIOForm
    update_lengths: ITensor

    def set_input(self: ILayer, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

class MoEActType:
    NONE: typing.ClassVar[MoEActType]
    SILU: typing.ClassVar[MoEActType]
    __members__: typing.ClassVar[dict[str, MoEActType]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IMoELayer(ILayer):
    activation_type: MoEActType
    dyn_q_output_scale_type: DataType
    quantization_block_shape: Dims
    quantization_to_type: DataType

    def set_gated_biases(self, fc_gate_biases: ITensor, fc_up_biases: ITensor, fc_down_biases: ITensor) -> None:
        ...

    def set_gated_weights(self, fc_gate_weights: ITensor, fc_up_weights: ITensor, fc_down_weights: ITensor, activation_type: MoEActType) -> None:
        ...

    def set_input(self, index: typing.SupportsInt, tensor: ITensor) -> None:
        ...

    def set_quantization_dynamic_dbl_q(self, fc_down_activation_dbl_q_scale: ITensor, data_type: DataType, block_shape: Dims, dyn_q_output_scale_type: DataType) -> None:
        ...

    def set_quantization_static(self, fc_down_activation_scale: ITensor, data_type: DataType) -> None:
        ...

    def set_swiglu_params(self, limit: typing.SupportsFloat, alpha: typing.SupportsFloat, beta: typing.SupportsFloat) -> None:
        ...

    @property
    def swiglu_param_alpha(self) -> float:
        ...

    @swiglu_param_alpha.setter
    def swiglu_param_alpha(self, arg1: typing.SupportsFloat) -> None:
        ...

    @property
    def swiglu_param_beta(self) -> float:
        ...

    @swiglu_param_beta.setter
    def swiglu_param_beta(self, arg1: typing.SupportsFloat) -> None:
        ...

    @property
    def swiglu_param_limit(self) -> float:
        ...

    @swiglu_param_limit.setter
    def swiglu_param_limit(self, arg1: typing.SupportsFloat) -> None:
        ...

class INetworkDefinition:
    error_recorder: typing.Any
    name: str

    @staticmethod
    def __enter__(this):
        ...

    @staticmethod
    def __exit__(this, exc_type, exc_value, traceback):
        ...

    def __del__(self) -> None:
        ...

    def __getitem__(self, arg0: typing.SupportsInt) -> ILayer:
        ...

    def __len__(self) -> int:
        ...

    def add_activation(self, input: ITensor, type: ActivationType) -> IActivationLayer:
        ...

    def add_assertion(self, condition: ITensor, message: str) -> IAssertionLayer:
        ...

    def add_attention(self, query: ITensor, key: ITensor, value: ITensor, norm_op: AttentionNormalizationOp, causal: builtins.bool) -> IAttention:
        ...

    def add_attention_v2(self, query: ITensor, key: ITensor, value: ITensor, norm_op: AttentionNormalizationOp, causal_kind: CausalMaskKind) -> IAttention:
        ...

    def add_cast(self, input: ITensor, to_type: DataType) -> ICastLayer:
        ...

    def add_concatenation(self, inputs: collections.abc.Sequence[ITensor]) -> IConcatenationLayer:
        ...

    def add_constant(self, shape: Dims, weights: Weights) -> IConstantLayer:
        ...

    def add_convolution_nd(self, input: ITensor, num_output_maps: typing.SupportsInt, kernel_shape: Dims, kernel: Weights, bias: Weights=None) -> IConvolutionLayer:
        ...

    def add_cumulative(self, input: ITensor, axis: ITensor, op: CumulativeOperation, exclusive: builtins.bool, reverse: builtins.bool) -> ICumulativeLayer:
        ...

    def add_deconvolution_nd(self, input: ITensor, num_output_maps: typing.SupportsInt, kernel_shape: Dims, kernel: Weights, bias: Weights=None) -> IDeconvolutionLayer:
        ...

    def add_dequantize(self, input: ITensor, scale: ITensor, output_type: DataType) -> IDequantizeLayer:
        ...

    def add_dist_collective(self, input: ITensor, dist_collective_op: CollectiveOperation, reduce_op: typing.Any, root: typing.Any, groups: typing.Any) -> IDistCollectiveLayer:
        ...

    def add_dynamic_quantize(self, input: ITensor, axis: typing.SupportsInt, block_size: typing.SupportsInt, output_type: DataType, scale_type: DataType) -> IDynamicQuantizeLayer:
        ...

    def add_dynamic_quantize_v2(self, input: ITensor, block_shape: Dims, output_type: DataType, scale_type: DataType) -> IDynamicQuantizeLayer:
        ...

    def add_einsum(self, inputs: collections.abc.Sequence[ITensor], equation: str) -> IEinsumLayer:
        ...

    def add_elementwise(self, input1: ITensor, input2: ITensor, op: ElementWiseOperation) -> IElementWiseLayer:
        ...

    def add_fill(self, shape: Dims, op: FillOperation, output_type: DataType=...) -> IFillLayer:
        ...

    def add_gather(self, input: ITensor, indices: ITensor, axis: typing.SupportsInt) -> IGatherLayer:
        ...

    def add_gather_v2(self, input: ITensor, indices: ITensor, mode: GatherMode) -> IGatherLayer:
        ...

    def add_grid_sample(self, input: ITensor, grid: ITensor) -> IGridSampleLayer:
        ...

    def add_identity(self, input: ITensor) -> IIdentityLayer:
        ...

    def add_if_conditional(self) -> IIfConditional:
        ...

    def add_input(self, name: str, dtype: DataType, shape: Dims) -> ITensor:
        ...

    def add_kv_cache_update(self, cache: ITensor, update: ITensor, write_indices: ITensor, cache_mode: KVCacheMode) -> IKVCacheUpdateLayer:
        ...

    def add_loop(self) -> ILoop:
        ...

    def add_lrn(self, input: ITensor, window: typing.SupportsInt, alpha: typing.SupportsFloat, beta: typing.SupportsFloat, k: typing.SupportsFloat) -> ILRNLayer:
        ...

    def add_matrix_multiply(self, input0: ITensor, op0: MatrixOperation, input1: ITensor, op1: MatrixOperation) -> IMatrixMultiplyLayer:
        ...

    def add_moe(self, hidden_states: ITensor, selected_experts_for_tokens: ITensor, scores_for_selected_experts: ITensor) -> IMoELayer:
        ...

    @typing.overload
    def add_nms(self, boxes: ITensor, scores: ITensor, max_output_boxes_per_class: ITensor) -> INMSLayer:
        ...

    @typing.overload
    def add_nms(self, boxes: ITensor, scores: ITensor, max_output_boxes_per_class: ITensor, indices_type: DataType) -> INMSLayer:
        ...

    @typing.overload
    def add_non_zero(self, input: ITensor) -> INonZeroLayer:
        ...

    @typing.overload
    def add_non_zero(self, input: ITensor, indices_type: DataType) -> INonZeroLayer:
        ...

    def add_normalization(self, input: ITensor, scale: ITensor, bias: ITensor, axesMask: typing.SupportsInt) -> INormalizationLayer:
        ...

    def add_normalization_v2(self, input: ITensor, scale: ITensor, bias: ITensor, axesMask: typing.SupportsInt) -> INormalizationLayer:
        ...

    def add_one_hot(self, indices: ITensor, values: ITensor, depth: ITensor, axis: typing.SupportsInt) -> IOneHotLayer:
        ...

    def add_padding_nd(self, input: ITensor, pre_padding: Dims, post_padding: Dims) -> IPaddingLayer:
        ...

    def add_parametric_relu(self, input: ITensor, slopes: ITensor) -> IParametricReLULayer:
        ...

    @typing.overload
    def add_plugin(self, tuple: tuple) -> IPluginV3Layer:
        ...

    @typing.overload
    def add_plugin(self, func: collections.abc.Callable) -> IPluginV3Layer:
        ...

    @typing.overload
    def add_plugin(self, func: collections.abc.Callable, aot: builtins.bool) -> IPluginV3Layer:
        ...

    def add_plugin_v2(self, inputs: collections.abc.Sequence[ITensor], plugin: IPluginV2) -> IPluginV2Layer:
        ...

    def add_plugin_v3(self, inputs: collections.abc.Sequence[ITensor], shape_inputs: collections.abc.Sequence[ITensor], plugin: IPluginV3) -> IPluginV3Layer:
        ...

    def add_pooling_nd(self, input: ITensor, type: PoolingType, window_size: Dims) -> IPoolingLayer:
        ...

    def add_quantize(self, input: ITensor, scale: ITensor, output_type: DataType) -> IQuantizeLayer:
        ...

    def add_ragged_softmax(self, input: ITensor, bounds: ITensor) -> IRaggedSoftMaxLayer:
        ...

    def add_reduce(self, input: ITensor, op: ReduceOperation, axes: typing.SupportsInt, keep_dims: builtins.bool) -> IReduceLayer:
        ...

    def add_resize(self, input: ITensor) -> IResizeLayer:
        ...

    def add_reverse_sequence(self, input: ITensor, sequence_lens: ITensor) -> IReverseSequenceLayer:
        ...

    def add_rotary_embedding(self, input: ITensor, cos_cache: ITensor, sin_cache: ITensor, interleaved: builtins.bool, rotary_embedding_dim: typing.SupportsInt) -> IRotaryEmbeddingLayer:
        ...

    def add_scale(self, input: ITensor, mode: ScaleMode, shift: Weights=None, scale: Weights=None, power: Weights=None) -> IScaleLayer:
        ...

    def add_scale_nd(self, input: ITensor, mode: ScaleMode, shift: Weights=None, scale: Weights=None, power: Weights=None, channel_axis: typing.SupportsInt=...) -> IScaleLayer:
        ...

    def add_scatter(self, data: ITensor, indices: ITensor, updates: ITensor, mode: ScatterMode) -> IScatterLayer:
        ...

    def add_select(self, condition: ITensor, then_input: ITensor, else_input: ITensor) -> ISelectLayer:
        ...

    def add_shape(self, input: ITensor) -> IShapeLayer:
        ...

    def add_shuffle(self, input: ITensor) -> IShuffleLayer:
        ...

    def add_slice(self, input: ITensor, start: Dims, shape: Dims, stride: Dims) -> ISliceLayer:
        ...

    def add_softmax(self, input: ITensor) -> ISoftMaxLayer:
        ...

    def add_squeeze(self, input: ITensor, axes: ITensor=None) -> ISqueezeLayer:
        ...

    @typing.overload
    def add_topk(self, input: ITensor, op: TopKOperation, k: typing.SupportsInt, axes: typing.SupportsInt) -> ITopKLayer:
        ...

    @typing.overload
    def add_topk(self, input: ITensor, op: TopKOperation, k: typing.SupportsInt, axes: typing.SupportsInt, indices_type: DataType) -> ITopKLayer:
        ...

    def add_unary(self, input: ITensor, op: UnaryOperation) -> IUnaryLayer:
        ...

    def add_unsqueeze(self, input: ITensor, axes: ITensor) -> IUnsqueezeLayer:
        ...

    def are_weights_marked_refittable(self, name: str) -> builtins.bool:
        ...

    def get_flag(self, flag: typing.Any) -> builtins.bool:
        ...

    def get_input(self, index: typing.SupportsInt) -> ITensor:
        ...

    def get_layer(self, index: typing.SupportsInt) -> ILayer:
        ...

    def get_output(self, index: typing.SupportsInt) -> ITensor:
        ...

    def is_debug_tensor(self, tensor: ITensor) -> builtins.bool:
        ...

    def mark_debug(self, tensor: ITensor) -> builtins.bool:
        ...

    def mark_output(self, tensor: ITensor) -> None:
        ...

    def mark_output_for_shapes(self, tensor: ITensor) -> builtins.bool:
        ...

    def mark_unfused_tensors_as_debug_tensors(self) -> builtins.bool:
        ...

    def mark_weights_refittable(self, name: str) -> builtins.bool:
        ...

    def remove_tensor(self, tensor: ITensor) -> None:
        ...

    def set_weights_name(self, weights: Weights, name: str) -> builtins.bool:
        ...

    def unmark_debug(self, tensor: ITensor) -> builtins.bool:
        ...

    def unmark_output(self, tensor: ITensor) -> None:
        ...

    def unmark_output_for_shapes(self, tensor: ITensor) -> builtins.bool:
        ...

    def unmark_unfused_tensors_as_debug_tensors(self) -> builtins.bool:
        ...

    def unmark_weights_refittable(self, name: str) -> builtins.bool:
        ...

    @property
    def builder(self) -> typing.Any:
        ...

    @property
    def flags(self) -> int:
        ...

    @property
    def has_implicit_batch_dimension(self) -> builtins.bool:
        ...

    @property
    def num_inputs(self) -> int:
        ...

    @property
    def num_layers(self) -> int:
        ...

    @property
    def num_outputs(self) -> int:
        ...

class ILogger:

    class Severity:
        ERROR: typing.ClassVar[ILogger.Severity]
        INFO: typing.ClassVar[ILogger.Severity]
        INTERNAL_ERROR: typing.ClassVar[ILogger.Severity]
        VERBOSE: typing.ClassVar[ILogger.Severity]
        WARNING: typing.ClassVar[ILogger.Severity]
        __members__: typing.ClassVar[dict[str, ILogger.Severity]]

        def __eq__(self, other: typing.Any) -> builtins.bool:
            ...

        def __ge__(self, other: typing.Any) -> builtins.bool:
            ...

        def __getstate__(self) -> int:
            ...

        def __gt__(self, other: typing.Any) -> builtins.bool:
            ...

        def __hash__(self) -> int:
            ...

        def __index__(self) -> int:
            ...

        def __init__(self, value: typing.SupportsInt) -> None:
            ...

        def __int__(self) -> int:
            ...

        def __le__(self, other: typing.Any) -> builtins.bool:
            ...

        def __lt__(self, other: typing.Any) -> builtins.bool:
            ...

        def __ne__(self, other: typing.Any) -> builtins.bool:
            ...

        def __repr__(self) -> str:
            ...

        def __setstate__(self, state: typing.SupportsInt) -> None:
            ...

        def __str__(self) -> str:
            ...

        @property
        def name(self) -> str:
            ...

        @property
        def value(self) -> int:
            ...
    ERROR: typing.ClassVar[ILogger.Severity]
    INFO: typing.ClassVar[ILogger.Severity]
    INTERNAL_ERROR: typing.ClassVar[ILogger.Severity]
    VERBOSE: typing.ClassVar[ILogger.Severity]
    WARNING: typing.ClassVar[ILogger.Severity]

    @staticmethod
    def __enter__(this):
        ...

    @staticmethod
    def __exit__(this, exc_type, exc_value, traceback):
        ...

    def __init__(self) -> None:
        ...

    def log(self, severity: ILogger.Severity, msg: str) -> None:
        ...

class Logger(ILogger):

    class Severity:
        ERROR: typing.ClassVar[ILogger.Severity]
        INFO: typing.ClassVar[ILogger.Severity]
        INTERNAL_ERROR: typing.ClassVar[ILogger.Severity]
        VERBOSE: typing.ClassVar[ILogger.Severity]
        WARNING: typing.ClassVar[ILogger.Severity]
        __members__: typing.ClassVar[dict[str, ILogger.Severity]]

        def __eq__(self, other: typing.Any) -> builtins.bool:
            ...

        def __ge__(self, other: typing.Any) -> builtins.bool:
            ...

        def __getstate__(self) -> int:
            ...

        def __gt__(self, other: typing.Any) -> builtins.bool:
            ...

        def __hash__(self) -> int:
            ...

        def __index__(self: ILogger.Severity) -> int:
            ...

        def __init__(self: ILogger.Severity, value: typing.SupportsInt) -> None:
            ...

        def __int__(self: ILogger.Severity) -> int:
            ...

        def __le__(self, other: typing.Any) -> builtins.bool:
            ...

        def __lt__(self, other: typing.Any) -> builtins.bool:
            ...

        def __ne__(self, other: typing.Any) -> builtins.bool:
            ...

        def __repr__(self) -> str:
            ...

        def __setstate__(self: ILogger.Severity, state: typing.SupportsInt) -> None:
            ...

        def __str__(self) -> str:
            ...

        @property
        def name(self) -> str:
            ...

        @property
        def value(self) -> int:
            ...
    ERROR: typing.ClassVar[ILogger.Severity]
    INFO: typing.ClassVar[ILogger.Severity]
    INTERNAL_ERROR: typing.ClassVar[ILogger.Severity]
    VERBOSE: typing.ClassVar[ILogger.Severity]
    WARNING: typing.ClassVar[ILogger.Severity]
    min_severity: ILogger.Severity

    def __init__(self, min_severity: ILogger.Severity=...) -> None:
        ...

    def log(self, severity: ILogger.Severity, msg: str) -> None:
        ...

class IProfiler:

    def __init__(self) -> None:
        ...

    def report_layer_time(self, layer_name: str, ms: typing.SupportsFloat) -> None:
        ...

class Profiler(IProfiler):

    def __init__(self) -> None:
        ...

    def report_layer_time(self: IProfiler, layer_name: str, ms: typing.SupportsFloat) -> None:
        ...

class IOptimizationProfile:

    def __bool__(self) -> builtins.bool:
        ...

    def __nonzero__(self) -> builtins.bool:
        ...

    def get_shape(self, input: str) -> list[Dims]:
        ...

    def get_shape_input(self, input: str) -> list[list[int]]:
        ...

    def set_shape(self, input: str, min: Dims, opt: Dims, max: Dims) -> None:
        ...

    def set_shape_input(self, input: str, min: collections.abc.Sequence[typing.SupportsInt], opt: collections.abc.Sequence[typing.SupportsInt], max: collections.abc.Sequence[typing.SupportsInt]) -> None:
        ...

    @property
    def extra_memory_target(self) -> float:
        ...

    @extra_memory_target.setter
    def extra_memory_target(self, arg1: typing.SupportsFloat) -> builtins.bool:
        ...

    @property
    def profile_stream(self) -> int:
        ...

    @profile_stream.setter
    def profile_stream(self, arg1: typing.SupportsInt) -> None:
        ...

class ErrorCodeTRT:
    FAILED_ALLOCATION: typing.ClassVar[ErrorCodeTRT]
    FAILED_COMPUTATION: typing.ClassVar[ErrorCodeTRT]
    FAILED_EXECUTION: typing.ClassVar[ErrorCodeTRT]
    FAILED_INITIALIZATION: typing.ClassVar[ErrorCodeTRT]
    INTERNAL_ERROR: typing.ClassVar[ErrorCodeTRT]
    INVALID_ARGUMENT: typing.ClassVar[ErrorCodeTRT]
    INVALID_CONFIG: typing.ClassVar[ErrorCodeTRT]
    INVALID_STATE: typing.ClassVar[ErrorCodeTRT]
    SUCCESS: typing.ClassVar[ErrorCodeTRT]
    UNSPECIFIED_ERROR: typing.ClassVar[ErrorCodeTRT]
    UNSUPPORTED_STATE: typing.ClassVar[ErrorCodeTRT]
    __members__: typing.ClassVar[dict[str, ErrorCodeTRT]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IErrorRecorder:

    def __init__(self) -> None:
        ...

    def clear(self) -> None:
        ...

    def get_error_code(self, arg0: typing.SupportsInt) -> ErrorCodeTRT:
        ...

    def get_error_desc(self, arg0: typing.SupportsInt) -> str:
        ...

    def has_overflowed(self) -> builtins.bool:
        ...

    def num_errors(self) -> int:
        ...

    def report_error(self, arg0: ErrorCodeTRT, arg1: str) -> builtins.bool:
        ...

    @property
    def MAX_DESC_LENGTH() -> int:
        ...

class IDebugListener:

    def __init__(self) -> None:
        ...

    def process_debug_tensor(self, addr: typing_extensions.CapsuleType, location: typing.Any, type: DataType, shape: Dims, name: str, stream: typing.SupportsInt) -> None:
        ...

class IOutputAllocator:

    def __init__(self) -> None:
        ...

class IProgressMonitor:

    def __init__(self) -> None:
        ...

    def phase_finish(self, phase_name: str) -> None:
        ...

    def phase_start(self, phase_name: str, parent_phase: str, num_steps: typing.SupportsInt) -> None:
        ...

    def step_complete(self, phase_name: str, step: typing.SupportsInt) -> builtins.bool:
        ...

class ExecutionContextAllocationStrategy:
    ON_PROFILE_CHANGE: typing.ClassVar[ExecutionContextAllocationStrategy]
    STATIC: typing.ClassVar[ExecutionContextAllocationStrategy]
    USER_MANAGED: typing.ClassVar[ExecutionContextAllocationStrategy]
    __members__: typing.ClassVar[dict[str, ExecutionContextAllocationStrategy]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IRuntimeConfig:

    def get_execution_context_allocation_strategy(self) -> ExecutionContextAllocationStrategy:
        ...

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy=...) -> None:
        ...

class IExecutionContext:
    debug_sync: builtins.bool
    enqueue_emits_profile: builtins.bool
    error_recorder: IErrorRecorder
    name: str
    nvtx_verbosity: typing.Any
    profiler: IProfiler
    temporary_allocator: typing.Any
    unfused_tensors_debug_state: builtins.bool

    @staticmethod
    def __enter__(this):
        ...

    @staticmethod
    def __exit__(this, exc_type, exc_value, traceback):
        ...

    def __del__(self) -> None:
        ...

    def execute_async_v3(self, stream_handle: typing.SupportsInt) -> builtins.bool:
        ...

    def execute_v2(self, bindings: collections.abc.Sequence[typing.SupportsInt]) -> builtins.bool:
        ...

    def get_debug_listener(self) -> IDebugListener:
        ...

    def get_debug_state(self, name: str) -> builtins.bool:
        ...

    def get_input_consumed_event(self) -> int:
        ...

    def get_max_output_size(self, name: str) -> int:
        ...

    def get_output_allocator(self, name: str) -> IOutputAllocator:
        ...

    def get_runtime_config(self) -> IRuntimeConfig:
        ...

    def get_tensor_address(self, name: str) -> int:
        ...

    def get_tensor_shape(self, name: str) -> Dims:
        ...

    def get_tensor_strides(self, name: str) -> Dims:
        ...

    def infer_shapes(self) -> list[str]:
        ...

    def report_to_profiler(self) -> builtins.bool:
        ...

    def set_all_tensors_debug_state(self, flag: builtins.bool) -> builtins.bool:
        ...

    def set_aux_streams(self, aux_streams: collections.abc.Sequence[typing.SupportsInt]) -> None:
        ...

    def set_communicator(self, communicator: typing_extensions.CapsuleType) -> builtins.bool:
        ...

    def set_debug_listener(self, listener: IDebugListener) -> builtins.bool:
        ...

    def set_device_memory(self, memory: typing.SupportsInt, size: typing.SupportsInt) -> None:
        ...

    def set_input_consumed_event(self, event: typing.SupportsInt) -> builtins.bool:
        ...

    @typing.overload
    def set_input_shape(self, name: str, shape: tuple) -> builtins.bool:
        ...

    @typing.overload
    def set_input_shape(self, name: str, shape: list) -> builtins.bool:
        ...

    @typing.overload
    def set_input_shape(self, name: str, shape: Dims) -> builtins.bool:
        ...

    def set_optimization_profile_async(self, profile_index: typing.SupportsInt, stream_handle: typing.SupportsInt) -> builtins.bool:
        ...

    def set_output_allocator(self, name: str, output_allocator: IOutputAllocator) -> builtins.bool:
        ...

    def set_tensor_address(self, name: str, memory: typing.SupportsInt) -> builtins.bool:
        ...

    def set_tensor_debug_state(self, name: str, flag: builtins.bool) -> builtins.bool:
        ...

    def update_device_memory_size_for_shapes(self) -> int:
        ...

    @property
    def active_optimization_profile(self) -> int:
        ...

    @property
    def all_binding_shapes_specified(self) -> builtins.bool:
        ...

    @property
    def engine(self) -> typing.Any:
        ...

    @property
    def persistent_cache_limit(self) -> int:
        ...

    @persistent_cache_limit.setter
    def persistent_cache_limit(self, arg1: typing.SupportsInt) -> None:
        ...

class SerializationFlag:
    EXCLUDE_LEAN_RUNTIME: typing.ClassVar[SerializationFlag]
    EXCLUDE_WEIGHTS: typing.ClassVar[SerializationFlag]
    INCLUDE_REFIT: typing.ClassVar[SerializationFlag]
    __members__: typing.ClassVar[dict[str, SerializationFlag]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class ISerializationConfig:

    def clear_flag(self, flag: SerializationFlag) -> builtins.bool:
        ...

    def get_flag(self, flag: SerializationFlag) -> builtins.bool:
        ...

    def set_flag(self, flag: SerializationFlag) -> builtins.bool:
        ...

    @property
    def flags(self) -> int:
        ...

    @flags.setter
    def flags(self, arg1: typing.SupportsInt) -> None:
        ...

class LayerInformationFormat:
    JSON: typing.ClassVar[LayerInformationFormat]
    ONELINE: typing.ClassVar[LayerInformationFormat]
    __members__: typing.ClassVar[dict[str, LayerInformationFormat]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class EngineInspector:
    error_recorder: IErrorRecorder
    execution_context: IExecutionContext

    def get_engine_information(self, format: LayerInformationFormat) -> str:
        ...

    def get_layer_information(self, layer_index: typing.SupportsInt, format: LayerInformationFormat) -> str:
        ...

class EngineCapability:
    DLA_STANDALONE: typing.ClassVar[EngineCapability]
    SAFETY: typing.ClassVar[EngineCapability]
    STANDARD: typing.ClassVar[EngineCapability]
    __members__: typing.ClassVar[dict[str, EngineCapability]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class TensorLocation:
    DEVICE: typing.ClassVar[TensorLocation]
    HOST: typing.ClassVar[TensorLocation]
    __members__: typing.ClassVar[dict[str, TensorLocation]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class TensorIOMode:
    INPUT: typing.ClassVar[TensorIOMode]
    NONE: typing.ClassVar[TensorIOMode]
    OUTPUT: typing.ClassVar[TensorIOMode]
    __members__: typing.ClassVar[dict[str, TensorIOMode]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class EngineStat:
    STRIPPED_WEIGHTS_SIZE: typing.ClassVar[EngineStat]
    TOTAL_WEIGHTS_SIZE: typing.ClassVar[EngineStat]
    __members__: typing.ClassVar[dict[str, EngineStat]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class ICudaEngine:
    error_recorder: IErrorRecorder

    @staticmethod
    def __enter__(this):
        ...

    @staticmethod
    def __exit__(this, exc_type, exc_value, traceback):
        ...

    def __del__(self) -> None:
        ...

    def __getitem__(self, arg0: typing.SupportsInt) -> str:
        ...

    def create_engine_inspector(self) -> EngineInspector:
        ...

    @typing.overload
    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy=...) -> IExecutionContext:
        ...

    @typing.overload
    def create_execution_context(self, runtime_config: IRuntimeConfig=None) -> IExecutionContext:
        ...

    def create_runtime_config(self) -> IRuntimeConfig:
        ...

    def create_serialization_config(self) -> ISerializationConfig:
        ...

    def get_aliased_input_tensor(self, name: str) -> str:
        ...

    def get_device_memory_size_for_profile_v2(self, profile_index: typing.SupportsInt) -> int:
        ...

    def get_engine_stat(self, stat: EngineStat=...) -> int:
        ...

    @typing.overload
    def get_tensor_bytes_per_component(self, name: str) -> int:
        ...

    @typing.overload
    def get_tensor_bytes_per_component(self, name: str, profile_index: typing.SupportsInt) -> int:
        ...

    @typing.overload
    def get_tensor_components_per_element(self, name: str) -> int:
        ...

    @typing.overload
    def get_tensor_components_per_element(self, name: str, profile_index: typing.SupportsInt) -> int:
        ...

    def get_tensor_dtype(self, name: str) -> DataType:
        ...

    @typing.overload
    def get_tensor_format(self, name: str) -> TensorFormat:
        ...

    @typing.overload
    def get_tensor_format(self, name: str, profile_index: typing.SupportsInt) -> TensorFormat:
        ...

    @typing.overload
    def get_tensor_format_desc(self, name: str) -> str:
        ...

    @typing.overload
    def get_tensor_format_desc(self, name: str, profile_index: typing.SupportsInt) -> str:
        ...

    def get_tensor_location(self, name: str) -> TensorLocation:
        ...

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        ...

    def get_tensor_name(self, index: typing.SupportsInt) -> str:
        ...

    def get_tensor_profile_shape(self, name: str, profile_index: typing.SupportsInt) -> list[Dims]:
        ...

    def get_tensor_profile_values(self, name: typing.SupportsInt, profile_index: str) -> list[list[int]]:
        ...

    def get_tensor_shape(self, name: str) -> Dims:
        ...

    @typing.overload
    def get_tensor_vectorized_dim(self, name: str) -> int:
        ...

    @typing.overload
    def get_tensor_vectorized_dim(self, name: str, profile_index: typing.SupportsInt) -> int:
        ...

    def get_weight_streaming_automatic_budget(self) -> int:
        ...

    def is_debug_tensor(self, name: str) -> builtins.bool:
        ...

    def is_shape_inference_io(self, name: str) -> builtins.bool:
        ...

    def serialize(self) -> IHostMemory:
        ...

    def serialize_with_config(self, arg0: ISerializationConfig) -> IHostMemory:
        ...

    @property
    def device_memory_size_v2(self) -> int:
        ...

    @property
    def engine_capability(self) -> EngineCapability:
        ...

    @property
    def hardware_compatibility_level(self) -> typing.Any:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def num_aux_streams(self) -> int:
        ...

    @property
    def num_io_tensors(self) -> int:
        ...

    @property
    def num_layers(self) -> int:
        ...

    @property
    def num_optimization_profiles(self) -> int:
        ...

    @property
    def profiling_verbosity(self) -> typing.Any:
        ...

    @property
    def refittable(self) -> builtins.bool:
        ...

    @property
    def streamable_weights_size(self) -> int:
        ...

    @property
    def tactic_sources(self) -> int:
        ...

    @property
    def weight_streaming_budget_v2(self) -> int:
        ...

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, arg1: typing.SupportsInt) -> builtins.bool:
        ...

    @property
    def weight_streaming_scratch_memory_size(self) -> int:
        ...

class DLAWorkspaceAllocationStrategy:
    DEFAULT: typing.ClassVar[DLAWorkspaceAllocationStrategy]
    SHARED_STATIC: typing.ClassVar[DLAWorkspaceAllocationStrategy]
    __members__: typing.ClassVar[dict[str, DLAWorkspaceAllocationStrategy]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class AllocatorFlag:
    RESIZABLE: typing.ClassVar[AllocatorFlag]
    __members__: typing.ClassVar[dict[str, AllocatorFlag]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IGpuAllocator(IVersionedInterface):

    def __init__(self) -> None:
        ...

    def allocate(self, size: typing.SupportsInt, alignment: typing.SupportsInt, flags: typing.SupportsInt) -> typing_extensions.CapsuleType:
        ...

    def allocate_async(self, size: typing.SupportsInt, alignment: typing.SupportsInt, flags: typing.SupportsInt, stream: typing.SupportsInt) -> typing_extensions.CapsuleType:
        ...

    def deallocate(self, memory: typing_extensions.CapsuleType) -> builtins.bool:
        ...

    def deallocate_async(self, memory: typing_extensions.CapsuleType, stream: typing.SupportsInt) -> builtins.bool:
        ...

    def reallocate(self, address: typing_extensions.CapsuleType, alignment: typing.SupportsInt, new_size: typing.SupportsInt) -> typing_extensions.CapsuleType:
        ...

class IGpuAsyncAllocator(IGpuAllocator):

    def __init__(self) -> None:
        ...

    def allocate(self, size: typing.SupportsInt, alignment: typing.SupportsInt, flags: typing.SupportsInt) -> typing_extensions.CapsuleType:
        ...

    def allocate_async(self: IGpuAllocator, size: typing.SupportsInt, alignment: typing.SupportsInt, flags: typing.SupportsInt, stream: typing.SupportsInt) -> typing_extensions.CapsuleType:
        ...

    def deallocate(self, memory: typing_extensions.CapsuleType) -> builtins.bool:
        ...

    def deallocate_async(self: IGpuAllocator, memory: typing_extensions.CapsuleType, stream: typing.SupportsInt) -> builtins.bool:
        ...

class SeekPosition:
    CUR: typing.ClassVar[SeekPosition]
    END: typing.ClassVar[SeekPosition]
    SET: typing.ClassVar[SeekPosition]
    __members__: typing.ClassVar[dict[str, SeekPosition]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IStreamReaderV2:

    def __init__(self) -> None:
        ...

    def read(self, destination: typing_extensions.CapsuleType, num_bytes: typing.SupportsInt, stream: typing.SupportsInt) -> int:
        ...

    def seek(self, offset: typing.SupportsInt, where: SeekPosition) -> builtins.bool:
        ...

class IStreamWriter:

    def __init__(self) -> None:
        ...

    def write(self, data: typing_extensions.CapsuleType, size: typing.SupportsInt) -> int:
        ...

class BuilderFlag:
    DEBUG: typing.ClassVar[BuilderFlag]
    DIRECT_IO: typing.ClassVar[BuilderFlag]
    DISABLE_COMPILATION_CACHE: typing.ClassVar[BuilderFlag]
    DISABLE_TIMING_CACHE: typing.ClassVar[BuilderFlag]
    DISTRIBUTIVE_INDEPENDENCE: typing.ClassVar[BuilderFlag]
    EDITABLE_TIMING_CACHE: typing.ClassVar[BuilderFlag]
    ERROR_ON_TIMING_CACHE_MISS: typing.ClassVar[BuilderFlag]
    EXCLUDE_LEAN_RUNTIME: typing.ClassVar[BuilderFlag]
    GPU_FALLBACK: typing.ClassVar[BuilderFlag]
    MONITOR_MEMORY: typing.ClassVar[BuilderFlag]
    REFIT: typing.ClassVar[BuilderFlag]
    REFIT_IDENTICAL: typing.ClassVar[BuilderFlag]
    REFIT_INDIVIDUAL: typing.ClassVar[BuilderFlag]
    SAFETY_SCOPE: typing.ClassVar[BuilderFlag]
    SPARSE_WEIGHTS: typing.ClassVar[BuilderFlag]
    STRICT_NANS: typing.ClassVar[BuilderFlag]
    STRIP_PLAN: typing.ClassVar[BuilderFlag]
    TF32: typing.ClassVar[BuilderFlag]
    VERSION_COMPATIBLE: typing.ClassVar[BuilderFlag]
    WEIGHT_STREAMING: typing.ClassVar[BuilderFlag]
    __members__: typing.ClassVar[dict[str, BuilderFlag]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class MemoryPoolType:
    DLA_GLOBAL_DRAM: typing.ClassVar[MemoryPoolType]
    DLA_LOCAL_DRAM: typing.ClassVar[MemoryPoolType]
    DLA_MANAGED_SRAM: typing.ClassVar[MemoryPoolType]
    TACTIC_DRAM: typing.ClassVar[MemoryPoolType]
    TACTIC_SHARED_MEMORY: typing.ClassVar[MemoryPoolType]
    WORKSPACE: typing.ClassVar[MemoryPoolType]
    __members__: typing.ClassVar[dict[str, MemoryPoolType]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class PreviewFeature:
    ALIASED_PLUGIN_IO_10_03: typing.ClassVar[PreviewFeature]
    RUNTIME_ACTIVATION_RESIZE_10_10: typing.ClassVar[PreviewFeature]
    __members__: typing.ClassVar[dict[str, PreviewFeature]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class HardwareCompatibilityLevel:
    AMPERE_PLUS: typing.ClassVar[HardwareCompatibilityLevel]
    NONE: typing.ClassVar[HardwareCompatibilityLevel]
    SAME_COMPUTE_CAPABILITY: typing.ClassVar[HardwareCompatibilityLevel]
    __members__: typing.ClassVar[dict[str, HardwareCompatibilityLevel]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class RuntimePlatform:
    SAME_AS_BUILD: typing.ClassVar[RuntimePlatform]
    WINDOWS_AMD64: typing.ClassVar[RuntimePlatform]
    __members__: typing.ClassVar[dict[str, RuntimePlatform]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class DeviceType:
    DLA: typing.ClassVar[DeviceType]
    GPU: typing.ClassVar[DeviceType]
    __members__: typing.ClassVar[dict[str, DeviceType]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class TempfileControlFlag:
    ALLOW_IN_MEMORY_FILES: typing.ClassVar[TempfileControlFlag]
    ALLOW_TEMPORARY_FILES: typing.ClassVar[TempfileControlFlag]
    __members__: typing.ClassVar[dict[str, TempfileControlFlag]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class ProfilingVerbosity:
    DETAILED: typing.ClassVar[ProfilingVerbosity]
    LAYER_NAMES_ONLY: typing.ClassVar[ProfilingVerbosity]
    NONE: typing.ClassVar[ProfilingVerbosity]
    __members__: typing.ClassVar[dict[str, ProfilingVerbosity]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class TacticSource:
    EDGE_MASK_CONVOLUTIONS: typing.ClassVar[TacticSource]
    JIT_CONVOLUTIONS: typing.ClassVar[TacticSource]
    __members__: typing.ClassVar[dict[str, TacticSource]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class TimingCacheKey:

    @staticmethod
    def parse(text: str) -> TimingCacheKey:
        ...

    def __str__(self) -> str:
        ...

class TimingCacheValue:

    def __init__(self, arg0: typing.SupportsInt, arg1: typing.SupportsFloat) -> None:
        ...

    @property
    def tacticHash(self) -> int:
        ...

    @tacticHash.setter
    def tacticHash(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def timingMSec(self) -> float:
        ...

    @timingMSec.setter
    def timingMSec(self, arg1: typing.SupportsFloat) -> None:
        ...

class ITimingCache:

    def combine(self, input_cache: ITimingCache, ignore_mismatch: builtins.bool) -> builtins.bool:
        ...

    def query(self, key: TimingCacheKey) -> TimingCacheValue:
        ...

    def queryKeys(self) -> list[TimingCacheKey]:
        ...

    def reset(self) -> builtins.bool:
        ...

    def serialize(self) -> IHostMemory:
        ...

    def update(self, key: TimingCacheKey, value: TimingCacheValue) -> builtins.bool:
        ...

class TilingOptimizationLevel:
    FAST: typing.ClassVar[TilingOptimizationLevel]
    FULL: typing.ClassVar[TilingOptimizationLevel]
    MODERATE: typing.ClassVar[TilingOptimizationLevel]
    NONE: typing.ClassVar[TilingOptimizationLevel]
    __members__: typing.ClassVar[dict[str, TilingOptimizationLevel]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class IBuilderConfig:
    build_route: str
    default_device_type: DeviceType
    engine_capability: EngineCapability
    hardware_compatibility_level: HardwareCompatibilityLevel
    profiling_verbosity: ProfilingVerbosity
    progress_monitor: IProgressMonitor
    remote_auto_tuning_config: str
    runtime_platform: RuntimePlatform
    tiling_optimization_level: TilingOptimizationLevel

    @staticmethod
    def __enter__(this):
        ...

    @staticmethod
    def __exit__(this, exc_type, exc_value, traceback):
        ...

    def __del__(self) -> None:
        ...

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        ...

    def can_run_on_DLA(self, layer: ILayer) -> builtins.bool:
        ...

    def clear_flag(self, flag: BuilderFlag) -> None:
        ...

    def create_timing_cache(self, serialized_timing_cache: typing_extensions.Buffer) -> ITimingCache:
        ...

    def get_device_type(self, layer: ILayer) -> DeviceType:
        ...

    def get_flag(self, flag: BuilderFlag) -> builtins.bool:
        ...

    def get_memory_pool_limit(self, pool: MemoryPoolType) -> int:
        ...

    def get_preview_feature(self, feature: PreviewFeature) -> builtins.bool:
        ...

    def get_tactic_sources(self) -> int:
        ...

    def get_timing_cache(self) -> ITimingCache:
        ...

    def is_device_type_set(self, layer: ILayer) -> builtins.bool:
        ...

    def reset(self) -> None:
        ...

    def reset_device_type(self, layer: ILayer) -> None:
        ...

    def set_device_type(self, layer: ILayer, device_type: DeviceType) -> None:
        ...

    def set_flag(self, flag: BuilderFlag) -> None:
        ...

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: typing.SupportsInt) -> None:
        ...

    def set_preview_feature(self, feature: PreviewFeature, enable: builtins.bool) -> None:
        ...

    def set_tactic_sources(self, tactic_sources: typing.SupportsInt) -> builtins.bool:
        ...

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: builtins.bool) -> builtins.bool:
        ...

    @property
    def DLA_core(self) -> int:
        ...

    @DLA_core.setter
    def DLA_core(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def all_build_routes(self) -> str:
        ...

    @property
    def avg_timing_iterations(self) -> int:
        ...

    @avg_timing_iterations.setter
    def avg_timing_iterations(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def builder_optimization_level(self) -> int:
        ...

    @builder_optimization_level.setter
    def builder_optimization_level(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def flags(self) -> int:
        ...

    @flags.setter
    def flags(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def l2_limit_for_tiling(self) -> int:
        ...

    @l2_limit_for_tiling.setter
    def l2_limit_for_tiling(self, arg1: typing.SupportsInt) -> builtins.bool:
        ...

    @property
    def max_aux_streams(self) -> int:
        ...

    @max_aux_streams.setter
    def max_aux_streams(self, arg1: typing.SupportsInt) -> builtins.bool:
        ...

    @property
    def max_num_tactics(self) -> int:
        ...

    @max_num_tactics.setter
    def max_num_tactics(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def num_optimization_profiles(self) -> int:
        ...

    @property
    def plugins_to_serialize(self) -> list[str]:
        ...

    @plugins_to_serialize.setter
    def plugins_to_serialize(self, arg1: collections.abc.Sequence[str]) -> None:
        ...

    @property
    def profile_stream(self) -> int:
        ...

    @profile_stream.setter
    def profile_stream(self, arg1: typing.SupportsInt) -> None:
        ...

class NetworkDefinitionCreationFlag:
    PREFER_AOT_PYTHON_PLUGINS: typing.ClassVar[NetworkDefinitionCreationFlag]
    PREFER_JIT_PYTHON_PLUGINS: typing.ClassVar[NetworkDefinitionCreationFlag]
    STRONGLY_TYPED: typing.ClassVar[NetworkDefinitionCreationFlag]
    __members__: typing.ClassVar[dict[str, NetworkDefinitionCreationFlag]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ge__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __gt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __le__(self, other: typing.Any) -> builtins.bool:
        ...

    def __lt__(self, other: typing.Any) -> builtins.bool:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class Builder:
    error_recorder: IErrorRecorder

    @staticmethod
    def __enter__(this):
        ...

    @staticmethod
    def __exit__(this, exc_type, exc_value, traceback):
        ...

    def __del__(self) -> None:
        ...

    def __init__(self, logger: ILogger) -> None:
        ...

    def build_engine_with_config(self, network: INetworkDefinition, config: IBuilderConfig) -> ICudaEngine:
        ...

    @typing.overload
    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory:
        ...

    @typing.overload
    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig, kernel_text: typing.Any) -> IHostMemory:
        ...

    def build_serialized_network_to_stream(self, network: INetworkDefinition, config: IBuilderConfig, writer: IStreamWriter) -> builtins.bool:
        ...

    def create_builder_config(self) -> IBuilderConfig:
        ...

    def create_network(self, flags: typing.SupportsInt=0) -> INetworkDefinition:
        ...

    def create_optimization_profile(self) -> IOptimizationProfile:
        ...

    def get_plugin_registry(self) -> IPluginRegistry:
        ...

    def is_network_supported(self, network: INetworkDefinition, config: IBuilderConfig) -> builtins.bool:
        ...

    def reset(self) -> None:
        ...

    @property
    def logger(self) -> ILogger:
        ...

    @property
    def max_DLA_batch_size(self) -> int:
        ...

    @property
    def max_threads(self) -> int:
        ...

    @max_threads.setter
    def max_threads(self, arg1: typing.SupportsInt) -> builtins.bool:
        ...

    @property
    def num_DLA_cores(self) -> int:
        ...

class Runtime:
    dla_workspace_allocation_strategy: DLAWorkspaceAllocationStrategy
    engine_host_code_allowed: builtins.bool
    error_recorder: IErrorRecorder
    temporary_directory: str

    @staticmethod
    def __enter__(this):
        ...

    @staticmethod
    def __exit__(this, exc_type, exc_value, traceback):
        ...

    def __del__(self) -> None:
        ...

    def __init__(self, logger: ILogger) -> None:
        ...

    @typing.overload
    def deserialize_cuda_engine(self, serialized_engine: typing_extensions.Buffer) -> ICudaEngine:
        ...

    @typing.overload
    def deserialize_cuda_engine(self, stream_reader_v2: IStreamReaderV2) -> ICudaEngine:
        ...

    def get_plugin_registry(self) -> IPluginRegistry:
        ...

    def load_runtime(self, path: str) -> Runtime:
        ...

    @property
    def DLA_core(self) -> int:
        ...

    @DLA_core.setter
    def DLA_core(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def logger(self) -> ILogger:
        ...

    @property
    def max_threads(self) -> int:
        ...

    @max_threads.setter
    def max_threads(self, arg1: typing.SupportsInt) -> builtins.bool:
        ...

    @property
    def num_DLA_cores(self) -> int:
        ...

    @property
    def tempfile_control_flags(self) -> int:
        ...

    @tempfile_control_flags.setter
    def tempfile_control_flags(self, arg1: typing.SupportsInt) -> None:
        ...

class Refitter:
    error_recorder: IErrorRecorder
    weights_validation: builtins.bool

    def __del__(self) -> None:
        ...

    def __init__(self, engine: ICudaEngine, logger: ILogger) -> None:
        ...

    def get_all(self) -> tuple[list[str], list[WeightsRole]]:
        ...

    def get_all_weights(self) -> list[str]:
        ...

    def get_missing(self) -> tuple[list[str], list[WeightsRole]]:
        ...

    def get_missing_weights(self) -> list[str]:
        ...

    def get_named_weights(self, weights_name: str) -> Weights:
        ...

    def get_weights_location(self, weights_name: str) -> TensorLocation:
        ...

    def get_weights_prototype(self, weights_name: str) -> Weights:
        ...

    def refit_cuda_engine(self) -> builtins.bool:
        ...

    def refit_cuda_engine_async(self, stream_handle: typing.SupportsInt) -> builtins.bool:
        ...

    def release_refit_resources(self) -> builtins.bool:
        ...

    @typing.overload
    def set_named_weights(self, name: str, weights: Weights) -> builtins.bool:
        ...

    @typing.overload
    def set_named_weights(self, name: str, weights: Weights, location: TensorLocation) -> builtins.bool:
        ...

    def set_weights(self, layer_name: str, role: WeightsRole, weights: Weights) -> builtins.bool:
        ...

    def unset_named_weights(self, weights_name: str) -> builtins.bool:
        ...

    @property
    def logger(self) -> ILogger:
        ...

    @property
    def max_threads(self) -> int:
        ...

    @max_threads.setter
    def max_threads(self, arg1: typing.SupportsInt) -> builtins.bool:
        ...

class NodeIndices:
    __hash__: typing.ClassVar[None] = None

    def __bool__(self: collections.abc.Sequence[typing.SupportsInt]) -> builtins.bool:
        ...

    def __contains__(self: collections.abc.Sequence[typing.SupportsInt], x: typing.SupportsInt) -> builtins.bool:
        ...

    @typing.overload
    def __delitem__(self: collections.abc.Sequence[typing.SupportsInt], arg0: typing.SupportsInt) -> None:
        ...

    @typing.overload
    def __delitem__(self: collections.abc.Sequence[typing.SupportsInt], arg0: slice) -> None:
        ...

    def __eq__(self: collections.abc.Sequence[typing.SupportsInt], arg0: collections.abc.Sequence[typing.SupportsInt]) -> builtins.bool:
        ...

    @typing.overload
    def __getitem__(self: collections.abc.Sequence[typing.SupportsInt], s: slice) -> list[int]:
        ...

    @typing.overload
    def __getitem__(self: collections.abc.Sequence[typing.SupportsInt], arg0: typing.SupportsInt) -> int:
        ...

    @typing.overload
    def __init__(self) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: collections.abc.Sequence[typing.SupportsInt]) -> None:
        ...

    @typing.overload
    def __init__(self, arg0: collections.abc.Iterable) -> None:
        ...

    def __iter__(self: collections.abc.Sequence[typing.SupportsInt]) -> collections.abc.Iterator[int]:
        ...

    def __len__(self: collections.abc.Sequence[typing.SupportsInt]) -> int:
        ...

    def __ne__(self: collections.abc.Sequence[typing.SupportsInt], arg0: collections.abc.Sequence[typing.SupportsInt]) -> builtins.bool:
        ...

    def __repr__(self: collections.abc.Sequence[typing.SupportsInt]) -> str:
        ...

    @typing.overload
    def __setitem__(self: collections.abc.Sequence[typing.SupportsInt], arg0: typing.SupportsInt, arg1: typing.SupportsInt) -> None:
        ...

    @typing.overload
    def __setitem__(self: collections.abc.Sequence[typing.SupportsInt], arg0: slice, arg1: collections.abc.Sequence[typing.SupportsInt]) -> None:
        ...

    def append(self: collections.abc.Sequence[typing.SupportsInt], x: typing.SupportsInt) -> None:
        ...

    def clear(self: collections.abc.Sequence[typing.SupportsInt]) -> None:
        ...

    def count(self: collections.abc.Sequence[typing.SupportsInt], x: typing.SupportsInt) -> int:
        ...

    @typing.overload
    def extend(self: collections.abc.Sequence[typing.SupportsInt], L: collections.abc.Sequence[typing.SupportsInt]) -> None:
        ...

    @typing.overload
    def extend(self: collections.abc.Sequence[typing.SupportsInt], L: collections.abc.Iterable) -> None:
        ...

    def insert(self: collections.abc.Sequence[typing.SupportsInt], i: typing.SupportsInt, x: typing.SupportsInt) -> None:
        ...

    @typing.overload
    def pop(self: collections.abc.Sequence[typing.SupportsInt]) -> int:
        ...

    @typing.overload
    def pop(self: collections.abc.Sequence[typing.SupportsInt], i: typing.SupportsInt) -> int:
        ...

    def remove(self: collections.abc.Sequence[typing.SupportsInt], x: typing.SupportsInt) -> None:
        ...

class OnnxParser:

    @staticmethod
    def __enter__(this):
        ...

    @staticmethod
    def __exit__(this, exc_type, exc_value, traceback):
        ...

    def __del__(self) -> None:
        ...

    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        ...

    def clear_errors(self) -> None:
        ...

    def clear_flag(self, flag: typing.Any) -> None:
        ...

    def get_error(self, index: typing.SupportsInt) -> typing.Any:
        ...

    def get_flag(self, flag: typing.Any) -> builtins.bool:
        ...

    def get_layer_output_tensor(self, name: str, i: typing.SupportsInt) -> ITensor:
        ...

    def get_subgraph_nodes(self, index: typing.SupportsInt) -> list:
        ...

    def get_used_vc_plugin_libraries(self) -> list[str]:
        ...

    def is_subgraph_supported(self, index: typing.SupportsInt) -> builtins.bool:
        ...

    def load_initializer(self, name: str, data: typing.SupportsInt, size: typing.SupportsInt) -> builtins.bool:
        ...

    def load_model_proto(self, model: typing_extensions.Buffer, path: str=None) -> builtins.bool:
        ...

    def parse(self, model: typing_extensions.Buffer, path: str=None) -> builtins.bool:
        ...

    def parse_from_file(self, model: str) -> builtins.bool:
        ...

    def parse_model_proto(self) -> builtins.bool:
        ...

    def set_builder_config(self, builder_config: IBuilderConfig) -> builtins.bool:
        ...

    def set_flag(self, flag: typing.Any) -> None:
        ...

    def supports_model_v2(self, model: typing_extensions.Buffer, path: str=None) -> builtins.bool:
        ...

    def supports_operator(self, op_name: str) -> builtins.bool:
        ...

    @property
    def flags(self) -> int:
        ...

    @flags.setter
    def flags(self, arg1: typing.SupportsInt) -> None:
        ...

    @property
    def num_errors(self) -> int:
        ...

    @property
    def num_subgraphs(self) -> int:
        ...

class OnnxParserFlag:
    ADJUST_FOR_DLA: typing.ClassVar[OnnxParserFlag]
    ENABLE_PLUGIN_OVERRIDE: typing.ClassVar[OnnxParserFlag]
    ENABLE_UINT8_AND_ASYMMETRIC_QUANTIZATION_DLA: typing.ClassVar[OnnxParserFlag]
    NATIVE_INSTANCENORM: typing.ClassVar[OnnxParserFlag]
    REPORT_CAPABILITY_DLA: typing.ClassVar[OnnxParserFlag]
    __members__: typing.ClassVar[dict[str, OnnxParserFlag]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class ErrorCode:
    INTERNAL_ERROR: typing.ClassVar[ErrorCode]
    INVALID_GRAPH: typing.ClassVar[ErrorCode]
    INVALID_NODE: typing.ClassVar[ErrorCode]
    INVALID_VALUE: typing.ClassVar[ErrorCode]
    MEM_ALLOC_FAILED: typing.ClassVar[ErrorCode]
    MODEL_DESERIALIZE_FAILED: typing.ClassVar[ErrorCode]
    REFIT_FAILED: typing.ClassVar[ErrorCode]
    SUCCESS: typing.ClassVar[ErrorCode]
    UNSUPPORTED_GRAPH: typing.ClassVar[ErrorCode]
    UNSUPPORTED_NODE: typing.ClassVar[ErrorCode]
    UNSUPPORTED_NODE_ATTR: typing.ClassVar[ErrorCode]
    UNSUPPORTED_NODE_DATATYPE: typing.ClassVar[ErrorCode]
    UNSUPPORTED_NODE_DYNAMIC: typing.ClassVar[ErrorCode]
    UNSUPPORTED_NODE_INPUT: typing.ClassVar[ErrorCode]
    UNSUPPORTED_NODE_SHAPE: typing.ClassVar[ErrorCode]
    __members__: typing.ClassVar[dict[str, ErrorCode]]

    def __eq__(self, other: typing.Any) -> builtins.bool:
        ...

    def __getstate__(self) -> int:
        ...

    def __hash__(self) -> int:
        ...

    def __index__(self) -> int:
        ...

    def __init__(self, value: typing.SupportsInt) -> None:
        ...

    def __int__(self) -> int:
        ...

    def __ne__(self, other: typing.Any) -> builtins.bool:
        ...

    @typing.overload
    def __repr__(self) -> str:
        ...

    @typing.overload
    def __repr__(self) -> str:
        ...

    def __setstate__(self, state: typing.SupportsInt) -> None:
        ...

    @typing.overload
    def __str__(self) -> str:
        ...

    @typing.overload
    def __str__(self) -> str:
        ...

    @property
    def name(self) -> str:
        ...

    @property
    def value(self) -> int:
        ...

class ParserError:

    def __repr__(self) -> str:
        ...

    def __str__(self) -> str:
        ...

    def code(self) -> ErrorCode:
        ...

    def desc(self) -> str:
        ...

    def file(self) -> str:
        ...

    def func(self) -> str:
        ...

    def line(self) -> int:
        ...

    def local_function_stack(self) -> list[str]:
        ...

    def local_function_stack_size(self) -> int:
        ...

    def node(self) -> int:
        ...

    def node_name(self) -> str:
        ...

    def node_operator(self) -> str:
        ...

class OnnxParserRefitter:

    def __init__(self, refitter: Refitter, logger: ILogger) -> None:
        ...

    def clear_errors(self) -> None:
        ...

    def get_error(self, index: typing.SupportsInt) -> ParserError:
        ...

    def load_initializer(self, name: str, data: typing.SupportsInt, size: typing.SupportsInt) -> builtins.bool:
        ...

    def load_model_proto(self, model: typing_extensions.Buffer, path: str=None) -> builtins.bool:
        ...

    def refit_from_bytes(self, model: typing_extensions.Buffer, path: str=None) -> builtins.bool:
        ...

    def refit_from_file(self, model: str) -> builtins.bool:
        ...

    def refit_model_proto(self) -> builtins.bool:
        ...

    @property
    def num_errors(self) -> int:
        ...

def get_builder_plugin_registry(arg0: typing.Any) -> IPluginRegistry:
    ...

def get_nv_onnx_parser_version() -> int:
    ...

def get_plugin_registry() -> typing.Any:
    ...

def init_libnvinfer_plugins(logger: typing_extensions.CapsuleType, namespace: str) -> builtins.bool:
    ...
_plugin_registry = None
bfloat16: DataType
bool: DataType
e8m0: DataType
float16: DataType
float32: DataType
fp4: DataType
fp8: DataType
int32: DataType
int4: DataType
int64: DataType
int8: DataType
uint8: DataType
